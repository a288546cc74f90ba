"""Family attention: threads of one request read the KV blocks that they share once per step."""
