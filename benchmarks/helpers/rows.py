"""Rows of numbers, which are printed as soon as they are measured."""

WIDTH = 10


class Rows(list):
    """A table as a list of dicts. `add` prints the row, and prints a new head if the columns
    change."""

    def add(self, **row: object) -> None:
        if not self or list(self[-1]) != list(row):
            print("".join(_cell(name) for name in row))
        print("".join(_cell(value) for value in row.values()), flush=True)
        self.append(row)


def _cell(value: object) -> str:
    words = f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
    return f"{words:>{max(WIDTH, len(words) + 1)}}"
