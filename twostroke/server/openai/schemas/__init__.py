"""What clients send, one file per endpoint. null is a field left out, types are strict, unknown fields are told."""
