"""What a model is made of: one frozen dataclass, and named presets."""

from dataclasses import asdict, dataclass, fields, replace

from labkit.errors import UserError, positive_number, whole_number


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Transformer. `n_experts = 0` is a dense model; otherwise every FFN is a mixture.

    `ffn_dim` is the inner width of the dense FFN, or of one expert. `head_dim = 0` means
    `dim // n_heads`. `max_seqlen` is the number of positions that the model was made for.
    """

    vocab_size: int = 50304
    dim: int = 2048
    n_layers: int = 16
    n_heads: int = 16
    n_kv_heads: int = 16
    head_dim: int = 0
    ffn_dim: int = 1024
    n_experts: int = 0
    experts_per_token: int = 0
    qk_norm: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_seqlen: int = 4096

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                whole = whole_number(field.name, value, least=min(1, field.default))
                object.__setattr__(self, field.name, whole)
            elif field.type is float:
                positive_number(field.name, value)
        if not self.head_dim:
            if self.dim % self.n_heads:
                raise UserError(
                    f"n_heads={self.n_heads} does not divide dim={self.dim}; "
                    "give head_dim, or change one of them"
                )
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}")
        if self.is_moe != (self.experts_per_token > 0):
            raise UserError(
                f"n_experts={self.n_experts} with experts_per_token={self.experts_per_token}: "
                "a mixture needs both above 0, a dense model has both at 0"
            )
        if self.experts_per_token > self.n_experts:
            raise UserError(
                f"experts_per_token={self.experts_per_token} exceeds n_experts={self.n_experts}"
            )
        for name in ("dim", "ffn_dim"):
            if self.is_moe and getattr(self, name) % 8:
                raise UserError(
                    f"{name}={getattr(self, name)} is not a multiple of 8, "
                    "as the grouped matrix multiply of the experts needs"
                )

    @property
    def is_moe(self) -> bool:
        return self.n_experts > 0

    @classmethod
    def preset(cls, name: str, **overrides) -> "ModelConfig":
        """The named preset with some fields replaced: `preset("olmoe-1b-7b", n_layers=4)`."""
        if name not in PRESETS:
            raise UserError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(overrides.keys() - known):
            raise UserError(f"unknown fields {unknown}; a ModelConfig has {sorted(known)}")
        if overrides.keys() & {"dim", "n_heads"}:
            overrides.setdefault("head_dim", 0)
        return replace(PRESETS[name], **overrides)

    def to_dict(self) -> dict:
        return asdict(self)


def _dense(**sizes) -> ModelConfig:
    return ModelConfig(vocab_size=32000, max_seqlen=2048, **sizes)


PRESETS = {
    "tiny": _dense(dim=256, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=688),
    "small": _dense(dim=768, n_layers=12, n_heads=12, n_kv_heads=4, ffn_dim=2048),
    "medium": _dense(dim=1024, n_layers=24, n_heads=16, n_kv_heads=4, ffn_dim=2816),
    "olmoe-tiny": ModelConfig(
        vocab_size=4096, dim=256, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=128,
        n_experts=16, experts_per_token=4, qk_norm=True, max_seqlen=512,
    ),
    "olmoe-1b-7b": ModelConfig(n_experts=64, experts_per_token=8, qk_norm=True),
}  # fmt: skip
