"""Which replica a request goes to: by the threads and KV blocks that it will probably bring."""
