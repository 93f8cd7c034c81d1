"""How a program ends, as who started it hears."""

import pytest

from kvferry.errors import ConfigurationError, EngineLost, JoinRefused
from kvferry.process import ENGINE_LOST_EXIT_CODE, REFUSED_EXIT_CODE, exit_code_of


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("no such model"), 2),
        (JoinRefused("model_id", "another model"), REFUSED_EXIT_CODE),
        (EngineLost("cuda:0 does not compute any more"), ENGINE_LOST_EXIT_CODE),
        (ValueError("a fault of ours"), 1),
    ],
)
def test_each_kind_of_end_has_its_code_and_says_why_also_out_of_a_group(error, code, capsys, caplog):
    assert exit_code_of(ExceptionGroup("", [ExceptionGroup("", [error])])) == code
    assert str(error) in caplog.text
    assert ("failed" in capsys.readouterr().out) is not isinstance(error, EngineLost), "another process may do better"
