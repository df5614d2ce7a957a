"""The edge between gRPC and values: codecs, the error tree as statuses, channel options, interceptors. No logic."""
