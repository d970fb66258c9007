"""The work of a vision transformer's patches, layers and projector in one forward pass, as the counts of `work`."""

from dataclasses import dataclass

from dflop.models.work import Layer, ModuleWork, PartWork, coefficients

__all__ = ["VitWidths", "vit_layer", "vit_work"]

# The approximate number of kernels of a forward pass in eager PyTorch: products, norms and pointwise operations.
_NUM_KERNELS = {"layer": 16, "first": 6, "last": 15}


@dataclass(frozen=True, kw_only=True, slots=True)
class VitWidths:
    """The sizes in which families' encoders of square pictures, with a two-layer projector, differ.

    An item is a picture of `image_size` pixels a side, cut into patches of `patch_size` pixels a side. It has
    `positions` positions in the layers. The projector turns `projected` positions of width `projector_width` into
    positions of width `out`, the LLM's hidden size. `in_vectors` and `out_vectors` are the numbers of parameters before
    and after the layers that are not in matrices. `shuffle_bytes` are moved, and `shuffle_saved_bytes` kept, for each
    projected position when positions are merged before the projector. `num_cuts` is how many copies of the features'
    gradient stand at a time where backward puts together what was cut into samples. `has_norm` says whether there is a
    last norm, and `norm_runs` whether it is used.
    """

    layer: Layer
    image_size: int
    patch_size: int
    positions: int
    projected: int
    projector_width: int
    out: int
    in_vectors: int
    out_vectors: int
    shuffle_bytes: float = 0.0
    shuffle_saved_bytes: float = 0.0
    num_cuts: int = 1
    has_norm: bool
    norm_runs: bool
    has_projector_biases: bool = True

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


def vit_layer(
    *,
    hidden: int,
    inner: int,
    num_heads: int,
    qkv_bias: bool = True,
    head_norm: int = 0,
    rms_norm: bool = False,
    scaled: bool = False,
) -> Layer:
    """A layer of a vision transformer: one key-value head a head, two matrices in the MLP, no rotary positions."""
    return Layer(
        hidden=hidden,
        query=hidden,
        key_value=hidden,
        inner=inner,
        num_heads=num_heads,
        head_norm=head_norm,
        rms_norm=rms_norm,
        gated=False,
        rotary=False,
        scaled=scaled,
        qkv_bias=qkv_bias,
        out_bias=True,
        mlp_bias=True,
    )


def vit_work(widths: VitWidths, tp: int) -> ModuleWork:
    """Counts of the encoder and its projector on each of `tp` ranks."""
    positions = widths.positions
    return ModuleWork(
        layer=widths.layer.work(
            tp,
            "num_items",
            positions,
            ("num_items", positions**2),
            causal=False,
            num_kernels=_NUM_KERNELS["layer"],
        ),
        first=_patches(widths),
        last=_projector(widths, tp),
        input_bytes=coefficients(num_items=2.0 * positions * widths.layer.hidden),
        stage_bytes=coefficients(),
    )


def _patches(widths: VitWidths) -> PartWork:
    """The patch embedding, whole on every rank."""
    hidden, patches = widths.layer.hidden, widths.num_patches
    pixels, patch = 3 * widths.image_size**2, 3 * widths.patch_size**2
    return PartWork(
        dense_flops=coefficients(num_items=2.0 * patches * patch * hidden),
        square_flops=coefficients(),
        causal=False,
        matmul_bytes=coefficients(num_items=2.0 * (pixels + patches * hidden)),
        # Adding the positions.
        pointwise_bytes=coefficients(num_items=6.0 * widths.positions * hidden),
        reduced_bytes=(coefficients(), coefficients()),
        saved_bytes=coefficients(num_items=2.0 * pixels),
        size=coefficients(num_items=patches * hidden),
        num_parameters=patch * hidden + widths.in_vectors,
        num_matrix_parameters=patch * hidden,
        num_kernels=_NUM_KERNELS["first"],
    )


def _projector(widths: VitWidths, tp: int) -> PartWork:
    """The last norm and the projector."""
    hidden, out = widths.layer.hidden, widths.out
    wide, positions, projected = widths.projector_width, widths.positions, widths.projected
    matrices = (wide * out + out * out) / tp
    return PartWork(
        dense_flops=coefficients(num_items=2.0 * projected * matrices),
        square_flops=coefficients(),
        causal=False,
        matmul_bytes=coefficients(num_items=2.0 * projected * (wide + 2 * out / tp + out)),
        # The last norm, merging positions, the activation, and putting rows together.
        pointwise_bytes=coefficients(
            num_items=4.0 * widths.norm_runs * positions * hidden
            + projected * (widths.shuffle_bytes + 4.0 * out / tp + 4.0 * out)
        ),
        reduced_bytes=(
            coefficients(num_items=2.0 * projected * out),
            coefficients(num_items=2.0 * projected * wide),
        ),
        saved_bytes=coefficients(
            num_items=widths.norm_runs * positions * (2.0 * hidden + 8.0)
            + projected * (widths.shuffle_saved_bytes + 2.0 * wide + 4.0 * out / tp),
        ),
        size=coefficients(num_items=projected * out / tp),
        num_parameters=widths.out_vectors
        + 2 * widths.has_norm * hidden
        + matrices
        + widths.has_projector_biases * (out / tp + out),
        num_matrix_parameters=matrices,
        num_kernels=_NUM_KERNELS["last"],
        # In backward, the copies of the features' gradient; then at the last matrix one of them, the gradient of the
        # activation's output, and that of the matrix.
        passing_bytes=(
            coefficients(num_items=projected * widths.num_cuts * 2.0 * out),
            coefficients(2.0 * out * out / tp, num_items=projected * (2.0 * out + 2.0 * out / tp)),
        ),
    )
