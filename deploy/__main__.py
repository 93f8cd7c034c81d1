"""`python -m deploy`: the `kvferry` command."""

from deploy.cli import main

main()
