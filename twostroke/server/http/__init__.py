"""HTTP around the routes: time limits on connections, the call's id and key, its body, and the bytes that go back."""
