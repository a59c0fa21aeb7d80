"""tools/check_is_causal.py: refused and accepted uses."""

import pytest

from tools import check_is_causal


@pytest.mark.parametrize(
    "source",
    [
        "sdpa(q, k, v, is_causal=True)",
        "sdpa(q, k, v, is_causal=q.shape == k.shape)",
        "partial(sdpa, is_causal=1)",
        "sdpa(q, k, v, **{'is_causal': True})",
        "F.scaled_dot_product_attention(q, k, v, None, 0.0, True)",
        "scaled_dot_product_attention(q, k, v, None, 0.0, causal)",
    ],
)
def test_a_causal_flag_is_found(source):
    assert [line for line, _ in check_is_causal.findings(f"\n{source}")] == [2]


@pytest.mark.parametrize(
    "source",
    [
        "sdpa(q, k, v, is_causal=False)",
        "sdpa(q, k, v, **{'is_causal': False})",
        "F.scaled_dot_product_attention(q, k, v, None, 0.0)",
        "'is_causal=True in a sentence'",
    ],
)
def test_other_code_passes(source):
    assert list(check_is_causal.findings(source)) == []


def test_a_finding_names_file_line_and_remedy(tmp_path, capsys):
    path = tmp_path / "attention.py"
    path.write_text("x = 1\nsdpa(q, k, v, is_causal=True)\n")
    assert check_is_causal.main([str(path)]) == 1
    assert f"{path}:2: is_causal=True: only right where T_q == T_k; call the helper" in capsys.readouterr().out


def test_only_the_guarding_helper_is_left_out(tmp_path):
    for name in ("causal.py", "sdpa.py"):
        path = tmp_path / check_is_causal.ALLOWED.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert [path.name for path in check_is_causal.searched_files(tmp_path)] == ["sdpa.py"]
