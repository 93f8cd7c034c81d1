"""The roads, one a module, each with a `ROAD`: see kvferry/kv/road.py for what that is."""
