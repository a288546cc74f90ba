"""Family attention: KV blocks that several threads share are read once per step."""
