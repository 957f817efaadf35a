"""Figures of a service in Prometheus' text format."""

from collections.abc import Mapping


class PrometheusText:
    """Collects metric families whose names begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._lines: list[str] = []

    def family(self, name: str, kind: str, meaning: str, *values: tuple[str, float]) -> None:
        """Add a family; each value comes with its labels in braces, or with the suffix of a histogram's line."""
        full = f"{self.prefix}_{name}"
        self._lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}"]
        self._lines += [f"{full}{labels} {value:.17g}" for labels, value in values]

    def labelled(self, name: str, kind: str, meaning: str, label: str, values: Mapping[str, float]) -> None:
        """Add a family with one value for each value of a label."""
        self.family(name, kind, meaning, *((f'{{{label}="{key}"}}', value) for key, value in sorted(values.items())))

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"
