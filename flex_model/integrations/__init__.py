"""What each framework's modules shard: read from their public attributes, without importing what is
not there.
"""
