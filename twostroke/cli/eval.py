"""`twostroke eval`: techniques compared on the same items."""

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag, ModelOptions, parse_pair, spread
from twostroke.cli.report import note, print_json, stderr_console

if TYPE_CHECKING:
    from twostroke.evals.contenders import Contender
    from twostroke.evals.run import Evaluation, Line, Options
    from twostroke.evals.summary import Summary
    from twostroke.evals.task import Task

FLAGS = {
    ("chat", True): "--chat",
    ("chat", False): "--raw",
    ("timings", False): "--no-timings",
    ("ignore_eos", True): "--ignore-eos",
}

app = typer.Typer(help="Compare techniques on the same items.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Compare techniques on the same items, with intervals, tests for pairs, and what the numbers cannot show."""


def _eval(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Evaluation", **settings)


@dataclass(frozen=True)
class EvalOptions:
    """Who is compared, on how many items, and where it is kept."""

    methods: Annotated[
        str,
        _eval(
            metavar="NAME[:KEY=VALUE,...],...",
            help="plain or teacher, repeat (the whole prompt twice, all kept), ptdo, ptdo+sinks, or any method's name.",
        ),
    ] = "plain,repeat,ptdo,ptdo+sinks"
    baseline: Annotated[
        str | None, _eval(help="Whom the others are held against.", show_default="repeat, else the first")
    ] = None
    measure: Annotated[
        str | None,
        _eval(
            metavar="NAME,...",
            help="answers, likelihood, divergence, judge, or several.",
            show_default="the task's own",
        ),
    ] = None
    limit: Annotated[int, _eval(min=1, help="Items; a larger limit continues a smaller one.")] = 100
    seed: Annotated[int, _eval(min=0, help="Of the items.")] = 0
    chat: Annotated[
        bool | None,
        _eval("--chat/--raw", help="Through the model's chat template, or as plain text.", show_default="--chat"),
    ] = None
    max_tokens: Annotated[int | None, _eval(min=1, help="Of a generated answer.", show_default="the task's own")] = None
    temperature: Annotated[
        float, _eval(min=0, help="Of generated answers; above 0, an item's random numbers are every method's.")
    ] = 0.0
    ignore_eos: Annotated[bool, _eval("--ignore-eos", help="Answers do not end before --max-tokens.")] = False
    positions: Annotated[int, _eval(min=1, help="Tokens of the baseline's answer, for divergence.")] = 64
    batch: Annotated[int, _eval(min=1, help="Items that run side by side.")] = 8
    timings: Annotated[
        bool,
        _eval(
            "--timings/--no-timings",
            help="Measure TTFT and ITL: every method computes its own prefills. Without, they share them: quicker.",
        ),
    ] = True
    output: Annotated[
        Path | None, _eval(file_okay=False, help="A directory for items and report; a run there is continued.")
    ] = None

    def contenders(self) -> "list[Contender]":
        """Raises InvalidRequest for what is not known, BadParameter for what is not of the form."""
        from twostroke.evals.contenders import contender

        made: list[Contender] = []
        for spec in split_methods(self.methods):
            name, _, rest = spec.partition(":")
            pairs = dict(parse_pair(pair, "--methods") for pair in rest.split(",")) if rest else {}
            made.append(contender(name, **pairs))
        return made

    def options(self) -> "Options":
        from twostroke.evals.run import Options

        measures = tuple(self.measure.split(",")) if self.measure else ()
        return Options(
            limit=self.limit,
            seed=self.seed,
            measures=measures,
            baseline=self.baseline,
            chat=self.chat,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            positions=self.positions,
            batch=self.batch,
            timings=self.timings,
        )


def split_methods(text: str) -> list[str]:
    """`plain,repeat:times=3,keep=all,ptdo` into three: a part with = and no : before it goes on with its method."""
    specs: list[str] = []
    for part in text.split(","):
        if specs and "=" in part and ":" not in part.partition("=")[0]:
            specs[-1] += f",{part}"
        else:
            specs.append(part.strip())
    return specs


@app.command()
@spread
def nameindex(
    *,
    names: Annotated[int, typer.Option(min=1, help="How many the list has.")] = 50,
    as_json: JsonFlag = False,
    eval_options: EvalOptions,
    model_options: ModelOptions,
) -> None:
    """Which is the k-th name of a list?"""
    from twostroke.evals.tasks import NameIndex

    evaluate(NameIndex(names), eval_options, model_options, as_json)


@app.command()
@spread
def middlematch(
    *,
    names: Annotated[int, typer.Option(min=3, help="How many the list has.")] = 40,
    different: Annotated[int, typer.Option(min=3, help="How many different names it draws from.")] = 10,
    as_json: JsonFlag = False,
    eval_options: EvalOptions,
    model_options: ModelOptions,
) -> None:
    """Which name stands directly between two given ones?"""
    from twostroke.evals.tasks import MiddleMatch

    evaluate(MiddleMatch(names, different), eval_options, model_options, as_json)


Order = Annotated[str, typer.Option(help="What is read first: options or question.")]
Answer = Annotated[str, typer.Option(help="What is asked for: the letter, or the option's text.")]


def _arc(name: str, about: str) -> None:
    """The command of one level of ARC."""

    @app.command(name, help=about)
    @spread
    def arc(
        *,
        order: Order = "options",
        answer: Answer = "letter",
        as_json: JsonFlag = False,
        eval_options: EvalOptions,
        model_options: ModelOptions,
    ) -> None:
        from twostroke.evals.tasks import ArcChallenge, ArcEasy

        task = ArcEasy if name == "arc-easy" else ArcChallenge
        evaluate(task(order, answer), eval_options, model_options, as_json)


_arc("arc-challenge", "Science questions with choices, the harder ones.")
_arc("arc-easy", "Science questions with choices, the easier ones.")


@app.command()
@spread
def longform(*, as_json: JsonFlag = False, eval_options: EvalOptions, model_options: ModelOptions) -> None:
    """Why and how questions with long answers: divergence, repetition, and the plain model's judgement."""
    from twostroke.evals.tasks import LongForm

    evaluate(LongForm(), eval_options, model_options, as_json)


@app.command()
@spread
def perplexity(
    *,
    context: Annotated[int, typer.Option(min=1, help="Tokens that are prefilled as the prompt.")] = 256,
    length: Annotated[int, typer.Option(min=1, help="Tokens that follow and are scored.")] = 128,
    as_json: JsonFlag = False,
    eval_options: EvalOptions,
    model_options: ModelOptions,
) -> None:
    """How surprising Wikipedia articles go on after their beginning."""
    from twostroke.evals.tasks import Perplexity

    evaluate(Perplexity(context, length), eval_options, model_options, as_json)


def evaluate(task: "Task", eval_options: EvalOptions, model_options: ModelOptions, as_json: bool) -> None:
    """Run, write what --output asks for, and print a table, or the summary as JSON."""
    from twostroke.evals.report import report, write
    from twostroke.evals.run import Evaluation
    from twostroke.evals.summary import summarize
    from twostroke.system.machine import describe

    contenders, options = eval_options.contenders(), eval_options.options()  # before a model is loaded
    evaluation = Evaluation(model_options.open(), task, contenders, options)
    summary = summarize(evaluation, run(evaluation, eval_options.output))
    machine, command = describe(model_options.device), command_line(task, eval_options, model_options)
    facts = {"command": command} | summary.as_dict() | machine
    if (directory := eval_options.output) is not None:
        write(directory, facts, report(summary, command, machine))
        note(f"the report is {directory / 'report.html'}")
    if as_json:
        print_json(facts)
    else:
        print_table(summary)


def run(evaluation: "Evaluation", directory: Path | None) -> "list[Line]":
    """With a bar on stderr where that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("items", total=len(evaluation.cases))
        return evaluation.run(directory, lambda done: bar.update(shown, completed=done))


def command_line(task: "Task", *options: EvalOptions | ModelOptions) -> str:
    """The command that does it again: every option that is not its default."""
    words = ["twostroke", "eval", task.name]
    for group in (task, *options):
        for field in fields(group):
            value = getattr(group, field.name)
            if value == field.default:
                continue
            flag = FLAGS.get((field.name, value))
            words += [flag] if flag else [f"--{field.name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def print_table(summary: "Summary") -> None:
    """A row for each metric, a column for each method; then what matters most, a row for each method."""
    from rich.console import Console
    from rich.table import Table

    from twostroke.evals.report import headlines, shown

    console = Console(highlight=False)
    for name, metrics in summary.metrics.items():
        table = Table(box=None, header_style="bold", title=name, title_justify="left")
        table.add_column("")
        for method in summary.methods:
            table.add_column(method, justify="right")
        for one in metrics:
            if one.metric.form != "curve":
                table.add_row(one.metric.title, *(shown(one.metric, one.of(method)) for method in summary.methods))
        console.print(table)
    brief = headlines(summary)
    table = Table(box=None, header_style="bold", title="at a glance", title_justify="left")
    for index, title in enumerate(brief.header):
        table.add_column(title, justify="right" if index else "left")
    for row in brief.rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"{summary.settings['model']}, {summary.n} items", soft_wrap=True, markup=False)
