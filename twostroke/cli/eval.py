"""`twostroke eval`: techniques compared on the same items."""

import shlex
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twostroke.cli.method_options import MethodModule, load_method_modules
from twostroke.cli.options import JsonFlag, ModelOptions, options_of, spread
from twostroke.cli.parsers import parse_pairs, without_password
from twostroke.cli.report import note, print_json, print_lines, progress_bar, table_of
from twostroke.fields import rules
from twostroke.study.evaluate.options import EvaluationOptions
from twostroke.study.evaluate.task import Task
from twostroke.study.evaluate.tasks import (
    ArcChallenge,
    ArcEasy,
    Cloze,
    LongBench,
    LongForm,
    MiddleMatch,
    NameIndex,
    Perplexity,
    Ruler,
)

if TYPE_CHECKING:
    from twostroke.study.evaluate.contenders import Contender
    from twostroke.study.evaluate.evaluation import Evaluation
    from twostroke.study.evaluate.run_directory import ItemRecords
    from twostroke.study.evaluate.summary import Summary

app = typer.Typer(help="Compare techniques on the same items.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Compare techniques on the same items, with intervals, tests for pairs, and what the numbers cannot show."""


_eval = partial(typer.Option, rich_help_panel="Evaluation")


@dataclass(frozen=True)
class ContenderOptions:
    """Options: which methods are compared."""

    methods: Annotated[
        str,
        _eval(
            metavar="NAME[:KEY=VALUE,...],...",
            help="plain or teacher, repeat (the whole prompt twice, all kept), ptdo, ptdo+sinks, or any method's name.",
        ),
    ] = "plain,repeat,ptdo,ptdo+sinks"
    budgets: Annotated[
        str,
        _eval(
            "--budgets",
            "--budget",
            metavar="SHARE,...",
            help="Methods that drop entries run once for each share of the prompt that stays.",
        ),
    ] = ""
    method_module: MethodModule = None

    def contenders(self, task: Task) -> "list[Contender]":
        """Raises InvalidRequest for an unknown method or parameter, BadParameter for a wrong form."""
        load_method_modules(self.method_module)
        from twostroke.study.evaluate.contenders import at_budgets, contender

        shares, length = self.shares(), getattr(task, "length", None)
        made, taken = list["Contender"](), False
        for spec in split_methods(self.methods):
            name, _, rest = spec.partition(":")
            pairs = parse_pairs(rest.split(",") if rest else (), "--methods")
            made += (own := at_budgets(name, shares, length, **pairs))
            taken |= own[0].name != contender(name, **pairs).name
        if shares and not taken:
            raise typer.BadParameter("none of the methods takes a budget: leave it out", param_hint="--budgets")
        return made

    def shares(self) -> list[float]:
        """The budgets. Raises BadParameter for what is none."""
        try:
            shares = [float(one) for one in self.budgets.split(",")] if self.budgets else []
        except ValueError:
            shares = [0.0]
        if not all(0 < one <= 1 for one in shares):
            raise typer.BadParameter(f"{self.budgets!r} has what is no share from 0 to 1", param_hint="--budgets")
        return shares


@dataclass(frozen=True)
class EvalOptions(
    options_of(
        EvaluationOptions,
        "Evaluation",
        leave_out=("measures",),
        changes={
            "baseline": {"show_default": "repeat, else the first"},
            "chat": {"names": ("--chat/--raw",), "show_default": "--chat"},
            "max_tokens": {"show_default": "the task's own"},
        },
    )
):
    """Options: what is measured, on how many items, and where the results are kept."""

    measure: Annotated[
        str | None,
        _eval(metavar="NAME,...", help=rules(EvaluationOptions)["measures"].help, show_default="the task's own"),
    ] = None
    output: Annotated[
        Path | None, _eval(file_okay=False, help="A directory for items and report; a run there is continued.")
    ] = None

    def options(self) -> EvaluationOptions:
        """Raises InvalidRequest naming the option that is out of range."""
        declared = {name: value for name, value in vars(self).items() if name in rules(EvaluationOptions)}
        return EvaluationOptions(**declared, measures=tuple(self.measure.split(",")) if self.measure else ())


def split_methods(text: str) -> list[str]:
    """`plain,repeat:times=3,keep=all,ptdo` into three. A part with = and without : belongs to the method before it."""
    specs: list[str] = []
    for part in text.split(","):
        if specs and "=" in part and ":" not in part.partition("=")[0]:
            specs[-1] += f",{part}"
        else:
            specs.append(part.strip())
    return specs


def _add_command(kind: type[Task]) -> None:
    """The command of a task: its parameters, who is compared, and how."""
    declared = options_of(kind, "Task")

    @app.command(kind.name, help=kind.__doc__)
    @spread
    def command(
        *,
        parameters: declared,  # pyright: ignore[reportInvalidTypeForm]
        as_json: JsonFlag = False,
        contenders: ContenderOptions,
        eval_options: EvalOptions,
        model_options: ModelOptions,
    ) -> None:
        evaluate(kind(**vars(parameters)), contenders, eval_options, model_options, as_json)


for _task in (NameIndex, MiddleMatch, Cloze, Ruler, LongBench, ArcChallenge, ArcEasy, LongForm, Perplexity):
    _add_command(_task)


def evaluate(
    task: Task, compared: ContenderOptions, eval_options: EvalOptions, model_options: ModelOptions, as_json: bool
) -> None:
    """Run, write what --output asks for, and print a table, or the summary as JSON."""
    from twostroke.study.evaluate.evaluation import Evaluation
    from twostroke.study.evaluate.report import report, write
    from twostroke.study.evaluate.summary import summarize
    from twostroke.system.machine import describe

    contenders, options = compared.contenders(task), eval_options.options()  # before a model is loaded
    with model_options.open() as llm:
        evaluation = Evaluation(llm, task, contenders, options)
        summary = summarize(evaluation, run(evaluation, eval_options.output))
    machine, command = describe(model_options.device), command_line(task, compared, eval_options, model_options)
    facts = {"command": command} | summary.as_dict() | machine
    if (directory := eval_options.output) is not None:
        write(directory, facts, report(summary, command, machine))
        note(f"the report is {directory / 'report.html'}")
    if as_json:
        print_json(facts)
    else:
        print_table(summary)


def run(evaluation: "Evaluation", directory: Path | None) -> "list[ItemRecords]":
    """Run the evaluation; a terminal on stderr shows a progress bar."""
    with progress_bar("items", len(evaluation.cases)) as update:
        return evaluation.run(directory, update)


def command_line(task: Task, *options: ContenderOptions | EvalOptions | ModelOptions) -> str:
    """The command that repeats the evaluation: every option that differs from its default."""
    words = ["twostroke", "eval", task.name]
    for group in (task, *options):
        for field in fields(group):
            value = getattr(group, field.name)
            if value != field.default:
                words += _spelled(field.name.replace("_", "-"), value)
    return shlex.join(words)


def _spelled(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return ["--raw" if (name, value) == ("chat", False) else f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) else [value]
    shown = [without_password(str(one)) if name == "kv-remote" else str(one) for one in values]
    return [word for one in shown for word in (f"--{name}", one)]


def print_table(summary: "Summary") -> None:
    """A row for each metric, a column for each method; then the headlines, a row for each method."""
    from rich.console import Console

    from twostroke.study.evaluate.report import headlines, shown

    console = Console(highlight=False)
    for name, metrics in summary.metrics.items():
        table = table_of("", *(f">{method}" for method in summary.methods), title=name)
        for one in metrics:
            if one.metric.form != "curve":
                table.add_row(one.metric.title, *(shown(one.metric, one.of(method)) for method in summary.methods))
        console.print(table)
    brief = headlines(summary)
    first, *rest = brief.header
    table = table_of(first, *(f">{title}" for title in rest), title="at a glance")
    for row in brief.rows:
        table.add_row(*row)
    console.print(table)
    print_lines([f"{summary.settings['model']}, {summary.n} items"])
