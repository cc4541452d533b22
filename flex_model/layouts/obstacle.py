"""Where the placement of a value was lost, and what is known of the cause."""

from __future__ import annotations

import enum
from typing import NamedTuple

from flex_model.layouts.logged import Value


class Reason(enum.Enum):
    """Why an operation has no rule for its operands: the text behind its name."""

    OTHERS = " of tensors that differ from rank to rank"
    NOT_MADE = " of a tensor of shape {} that no operation of this forward made"
    INTO_WHOLE = " of shards into the whole buffer {}"
    WITH_WHOLE = " of rows with as many of {}"


class Cause(NamedTuple):
    """A reason, and the operand that it is about: its shape, or the weight's name in quotes."""

    reason: Reason
    subject: str = ""

    def __str__(self) -> str:
        return self.reason.value.format(self.subject)


class Step(NamedTuple):
    """The reason why a value is placed as it is.

    Attributes:
        text: The operation and the cause, or the source of the value.
        inputs: The values that the operation read.
        module: The module whose forward ran it, by name; "" outside of all but the root.
        cause: Why the operation has lost the placement, as far as that is known.
    """

    text: str
    inputs: tuple[Value, ...] = ()
    module: str = ""
    cause: Cause | None = None

    def __str__(self) -> str:
        return f"{self.text} in {self.module!r}" if self.module else self.text


class Obstacle(NamedTuple):
    """The first operation on the way to a value at which its placement was lost.

    Attributes:
        text: Its step. An operation's begins with its name.
        cause: What is known of the reason.
        difference: An operation before it that not all ranks ran.
        num_parts: Of how many parts the rows on the way to the value consist.
    """

    text: str
    cause: Cause | None = None
    difference: str = ""
    num_parts: int = 1

    def __str__(self) -> str:
        text = self.text
        if self.difference:
            text += f": the ranks' control flow differs, not all ran {self.difference}"
        if self.num_parts > 1:
            text += f", beside rows in {self.num_parts} parts"
        return text
