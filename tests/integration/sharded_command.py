"""The `apar` command on processes of torchrun that shard the model with FSDP2, without a GPU."""

from tests.integration.cpu_sharding import shard_on_cpu

if __name__ == "__main__":
    shard_on_cpu()
    # After the environment that torch and accelerate read.
    from cluster.cli.main import app

    app()
