import numpy as np
import pytest

from funcgrad import checks


def test_choices():
    checks.check_choice("order", "strided", ("strided", "contiguous"))
    with pytest.raises(ValueError, match=r"order must be one of 'strided', 'contiguous', or a number; got \['strided'\]"):
        checks.check_choice("order", ["strided"], ("strided", "contiguous"), ", or a number")


def test_positive_integers():
    assert [checks.positive_integer("n", value) for value in (1, np.int64(7))] == [1, 7]
    for value, error in ((0, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error, match=rf"n must be .*at least 1; got {value!r}"):
            checks.positive_integer("n", value)


def test_argument_numbers():
    assert checks.argument_numbers("argnums", 2) == (2,)
    assert checks.argument_numbers("argnums", [0, np.int32(2)]) == (0, 2)
    assert checks.argument_numbers("argnums", ()) == ()
    assert checks.resolve_argument_numbers("argnums", (0, -1), 3) == (0, 2)
    with pytest.raises(
        ValueError, match=r"argnums names argument 1, but the function was called with 1 positional argument. Pass"
    ):
        checks.resolve_argument_numbers("argnums", (1,), 1)
    with pytest.raises(ValueError, match=r"argnums names argument -4, but the function was called with 3 positional arguments"):
        checks.resolve_argument_numbers("argnums", (-4,), 3)
