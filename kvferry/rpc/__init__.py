"""The wire: committed stubs of `proto/`, one converter, and the gRPC form of the three links."""
