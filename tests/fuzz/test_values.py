"""Conditions, prompts, URLs and settings of any kind: an answer, or an error of ours that names what is wrong."""

from __future__ import annotations

import datetime
import decimal
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.common import examples, json_values, survives
from verl_adaptive.cli import UsageError
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.policy import build_policy
from verl_adaptive.redact import redact
from verl_adaptive.report.expressions import Expression
from verl_adaptive.report.prompts import Prompts
from verl_adaptive.stats import Journal, StatsTable, dataset_keys, warm_start
from verl_adaptive.stats.database import make_engine, parse_url, shown
from verl_adaptive.stats.locate import locate

# -- conditions -----------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        "visits",
        "pass_rate",
        "source",
        "key",
        "greso.x",
        "0",
        "1e308",
        "0.5",
        "'gsm8k'",
        "True",
        "None",
        "not",
        "and",
        "or",
    ]
    + [
        "(",
        ")",
        "[",
        "]",
        ",",
        "<",
        "<=",
        "==",
        "!=",
        "in",
        "not in",
        "+",
        "-",
        "*",
        "/",
        "**",
        "lambda: 0",
        "x.__class__",
    ]
    + ["{}", "f'{visits}'", "9" * 400, "\\", "\x00", "é", ":=", "await", "'''", "#", "if", "else", "@", "%", "~", "|"]
)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    table = StatsTable()
    keys = dataset_keys({"data_source": "gsm8k", "prompt": str(i)} for i in range(7))
    table.rows_for(keys, sources=["gsm8k"] * 7)
    return Prompts(table)


@examples(150)
@given(st.lists(WORDS, max_size=14).map(" ".join) | st.text(max_size=60))
def test_any_condition(prompts, text) -> None:
    with survives() as said:
        chosen = Expression(text).select(prompts)
        assert chosen.dtype == bool and chosen.shape == (7,)
    assert not said or "\n" not in said[0] or "\n" in text


# -- keys -----------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.binary(max_size=8)
    | st.decimals()
    | st.datetimes()
    | st.timedeltas()
    | st.builds(object)
    | st.sampled_from([np.float32("nan"), np.datetime64("NaT"), np.int8(-1), np.array(3), np.zeros((2, 2)), "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=8,
)


@examples(150)
@given(values, values, values)
def test_keys_of_anything(messages, answer, source) -> None:
    row = {"prompt": messages, "data_source": source, "reward_model": {"ground_truth": answer}}
    try:
        first, again = dataset_keys([row]), dataset_keys([row])
    except (TypeError, ValueError) as error:  # callers add the file and the row
        assert str(error)
    else:
        assert np.array_equal(first, again)


def test_keys_of_what_is_endless_or_odd() -> None:
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    around: list = []
    around.append(around)
    for messages in (deep, around):
        with pytest.raises(ValueError, match="nested too deeply"):
            dataset_keys([{"prompt": messages}])
    dataset_keys([{"prompt": decimal.Decimal("sNaN")}, {"prompt": datetime.date.max}])


# -- URLs -----------------------------------------------------------------------------------------------------------

SECRET = "hunter2"
passwords = st.text(string.ascii_letters + string.digits + "@:/#?&%=+!$ []'\"\\", max_size=5).map(
    lambda t: f"{t}{SECRET}{t[::-1]}"
)
USER = string.ascii_letters + string.digits + "._-é%"
schemes = st.sampled_from(["postgresql", "postgresql+psycopg", "postgres", "mysql", "sqlite", "", "x y"])
endings = st.sampled_from(
    ["", "/db", ":5432/db", ":port/db", "/db?sslmode=require", "/db?options=-c%20a", ":99999999/x", "]/db"]
)


@examples(150)
@given(schemes, st.text(USER, max_size=4), passwords, st.text(USER, max_size=6), endings)
def test_passwords_never_show(scheme, user, password, host, ending) -> None:
    """However wrong the URL is: neither in the error, nor in what caused it, nor in what is shown of it."""
    url = f"{scheme}://{user}:{password}@{host}{ending}"
    texts = []
    try:
        parsed = parse_url(url)
        texts += [shown(parsed), shown(url)]
        make_engine(parsed, read_only=True)
    except AdaptiveError as error:
        texts += [str(error), str(error.__cause__ or ""), shown(url)]
    if " " not in url and "\n" not in url:
        texts.append(redact(url))
    for text in texts:
        assert SECRET not in text


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{SECRET}@h/db",
        f"postgresql://u:a/{SECRET}@h/db",
        f"postgresql://u:a@{SECRET}@h/db",
        f"postgresql://u:a:{SECRET}@h/db",
        f"postgresql://h/db?user=u&password={SECRET}",
        f"postgresql://h/db?sslpassword={SECRET}&sslmode=require",
        f"postgresql://u:{SECRET}@h:port/db",
        f"nothing://u:{SECRET}@h/db",
        f"postgresql://:{SECRET}@h/db",
        f"postgresql://me@corp.com:{SECRET}@h/db",
        f"postgresql://u:a b {SECRET}@h/db",
        f"postgresql://u:a#{SECRET}@h/db",
        f"postgresql://u:{SECRET}#b@h/db",
        f"postgresql://u:a?{SECRET}@h/db",
        f"postgresql://u:a%40{SECRET}@h/db",
        f"postgresql://u:a@b/{SECRET}@h/db",
        f"postgresql://u:5/{SECRET}@h/db",
        f"postgresql://u:'{SECRET}'@h/db",
        f"postgresql://u:{SECRET}@[::1]:5432/db",
        f"postgresql://u:{SECRET}@/db?host=/nowhere",
        f"postgresql://u:{SECRET}@h1,h2/db",
        f"postgresql+asyncpg://u:{SECRET}@h/db",
        f"POSTGRESQL://u:{SECRET}@h/db",
        f"postgresql:/u:{SECRET}@h/db",
        f"postgresql:u:{SECRET}@h/db",
        f"//u:{SECRET}@h/db",
        f"u:{SECRET}@h/db",
        f"jdbc:postgresql://h/db?user=u&password={SECRET}",
        f"host=h user=u password={SECRET} dbname=d",
        f"host=h user=u password='a {SECRET}'",
        f"host=h;Pwd={SECRET};",
        f"postgresql://h/db?PASSWORD={SECRET}",
        f"postgresql://h/db?pass%77ord={SECRET}",
        f"postgresql://h/db?pasword={SECRET}",
        f"postgresql://h/db?password=a+{SECRET}",
        f"postgresql://h/db?password=a'{SECRET}",
        f"postgresql://h/db?a=1;password={SECRET}",
        f"postgresql://h/db?dbname=postgresql%3A%2F%2Fu%3A{SECRET}%40h",
        f"postgresql://127.0.0.1:1/db?passfile=/x&password={SECRET}",
        f"postgresql://u:{SECRET}@127.0.0.1:1/db",
        f"sqlite:////proc/nowhere/x?key={SECRET}",
        f"sqlite://u:{SECRET}@/x",
        f"mysql://h/db?password={SECRET}",
        f"postgresql://u%3A{SECRET}@h/db",
        f"postgresql://u%3a{SECRET}%40127.0.0.1:1/db",
        f"postgresql://u:{SECRET}@127.0.0.1:1/db?application_name=postgresql://u:{SECRET}@h",
    ],
)
def test_passwords_are_in_no_message(url, tmp_path, capsys, caplog, monkeypatch) -> None:
    monkeypatch.setattr("verl_adaptive.redact._KNOWN", {})  # what other tests gave away
    monkeypatch.chdir(tmp_path)
    from verl_adaptive.cli import main

    assert main(["stats", url]) == 1
    assert main(["export", url, str(tmp_path / "x.csv")]) == 1
    assert (
        main(["filter-dataset", str(tmp_path / "no.parquet"), "o.parquet", "--stats", url, "--where", "visits>0"]) == 1
    )
    assert main(["stats", f"{url}#run"]) == 1 and main(["compare", url, url]) == 1
    try:
        Journal.open(url, run_id="r").close()
    except AdaptiveError as error:
        assert SECRET not in str(error) + str(error.__cause__ or "")
    with pytest.raises(AdaptiveError) as refused:
        warm_start(StatsTable(), url, discount=0.5)
    assert SECRET not in str(refused.value)
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err + caplog.text + shown(url) + redact(f"cannot use {url}: try again")
    for key, value in (("store", {"url": url, "nonsense": 1}), ("warm_start", {"x": url}), ("urll", url)):
        with pytest.raises(ConfigError) as error:
            AdaptiveConfig.from_mapping({key: value})
        assert SECRET not in str(error.value)


@examples(100)
@given(st.text(st.characters(blacklist_categories=("Cs",)), max_size=40))
def test_any_source(text) -> None:
    if "\0" in text or text.startswith(("/", "~")):
        text = text.replace("\0", "0").lstrip("/~")
    with survives():
        locate(text or "nothing")


# -- settings -------------------------------------------------------------------------------------------------------

NAMES = [*AdaptiveConfig.__dataclass_fields__, "nonsense", ""]
ROLES = {
    "sampler": ["epoch", "greso", "cero", "mopps", "retire", "nothing"],
    "allocator": ["fixed", "aero", "pilot_commit", "reinforce_ada", ""],
    "filter": ["keep_all", "informative", "band", "aero", "../x"],
    "advantage": ["verl", "beta", "discounted_beta", "os.system"],
}
part = st.one_of(
    *(
        st.fixed_dictionaries(
            {"name": st.sampled_from(names) | json_values}, optional={"p_easy": json_values, "n_pilot": json_values}
        )
        for names in ROLES.values()
    )
)


@examples(200)
@given(
    st.dictionaries(
        st.sampled_from(NAMES), json_values | part | st.dictionaries(st.just("url"), json_values), max_size=4
    )
)
def test_any_settings(group) -> None:
    with survives() as said:
        build_policy(AdaptiveConfig.from_mapping(group))
    assert not said or "adaptive" in said[0]


@examples(100)
@given(json_values)
def test_no_settings_at_all(value) -> None:
    with survives() as said:
        AdaptiveConfig.from_mapping(value)
    assert not said or said[0].startswith("adaptive")


def test_wrong_usage_is_ours_too() -> None:
    assert issubclass(UsageError, AdaptiveError)
