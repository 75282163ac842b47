"""The bytes of a message: head frames, notices of failure, cards. Knows nothing of Python objects or transports."""
