"""What clients send, one file per endpoint. Unknown fields are ignored, null is a field left out, types are strict."""
