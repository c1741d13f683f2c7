import numpy as np
import pytest

from funcgrad import options


def test_choices():
    options.check_choice("order", "strided", ("strided", "contiguous"))
    with pytest.raises(ValueError, match=r"order must be one of 'strided', 'contiguous', or a number; got \['strided'\]"):
        options.check_choice("order", ["strided"], ("strided", "contiguous"), ", or a number")


def test_positive_integers():
    assert [options.positive_integer("n", value) for value in (1, np.int64(7))] == [1, 7]
    for value, error in ((0, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error, match=rf"n must be .*at least 1; got {value!r}"):
            options.positive_integer("n", value)


def test_argument_numbers():
    assert options.argument_numbers("argnums", 2) == (2,)
    assert options.argument_numbers("argnums", [0, np.int32(2)]) == (0, 2)
    assert options.argument_numbers("argnums", ()) == ()
    assert options.resolve_argument_numbers("argnums", (0, -1), 3) == (0, 2)
    with pytest.raises(
        ValueError, match=r"argnums names argument 1, but the function was called with 1 positional argument. Pass"
    ):
        options.resolve_argument_numbers("argnums", (1,), 1)
    with pytest.raises(ValueError, match=r"argnums names argument -4, but the function was called with 3 positional arguments"):
        options.resolve_argument_numbers("argnums", (-4,), 3)
