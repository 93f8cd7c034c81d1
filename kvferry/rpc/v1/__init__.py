"""Generated from proto/kvferry/v1 by `make stubs`. Do not edit."""
