"""Routing: choose the replica for each request.

`policies.py` holds the policies and says how to add one. `table.py` estimates the load of each
replica. `shared_router.py` keeps one router per deployment in a gateway's process, and
`ray_router.py` plugs it into Ray Serve.
"""
