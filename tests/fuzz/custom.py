"""Operations of another namespace, registered once in a process."""

import torch


@torch.library.custom_op("fuzz::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


double.register_autograd(lambda ctx, grad: grad * 2)


@torch.library.custom_op("fuzz::with_own_backward", mutates_args=())
def with_own_backward(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@torch.library.custom_op("fuzz::its_backward", mutates_args=())
def its_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad * x.cos()


def keep_input(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


with_own_backward.register_autograd(
    lambda ctx, grad: its_backward(grad, ctx.saved_tensors[0]), setup_context=keep_input
)


class Cube(torch.autograd.Function):
    """An autograd.Function whose backward is not made of the forward's operations."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x
