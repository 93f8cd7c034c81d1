"""What both workers are made of: the loop, serving and reading blocks, joining a router. No policy, no torch."""
