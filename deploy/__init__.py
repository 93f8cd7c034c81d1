"""Deployments: the `kvferry` command, local processes, examples."""
