"""The `apar` command on torchrun's CPU processes that shard the model with FSDP2."""

from tests.integration.cpu_sharding import shard_on_cpu

if __name__ == "__main__":
    shard_on_cpu()
    # After the environment that torch and accelerate read.
    from cluster.cli.main import app

    app()
