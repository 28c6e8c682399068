"""Charts as Plotly figures: pure functions from domain values to JSON-ready dicts.

Colours are named, not fixed: a string ``var(--name)`` stands for the style sheet's variable, which the page puts in
when it draws, so that a figure follows the light or dark theme. The page draws the
legend too, from the traces. Texts that came from users are escaped: Plotly reads
a subset of HTML in them.
"""

import html
from collections.abc import Sequence
from typing import Any

from autotune.domain.study import Trial
from autotune.domain.throughput import Throughput, rate_unit, shown_throughput
from engine.report import Measurement, Outcome
from web import format as fmt
from web.measured import fastest
from web.words import trial_cue

Figure = dict[str, Any]

_STAGE_SYMBOLS = ("circle", "square", "diamond", "triangle-up")
_NO_RESULT_SYMBOLS = {"memory": "x", "bad": "triangle-down", "muted": "line-ew-open"}
_NO_RESULT_NAMES = {"memory": "out of memory", "bad": "failed", "muted": "stopped"}


def history(trials: Sequence[Trial]) -> Figure:
    """Tokens per second by trial, the best so far as a line, the baseline dashed; failures marked on the axis."""
    rated = [(trial, rate) for trial in trials if (rate := shown_throughput(trial)) is not None]
    data: list[Figure] = []
    if rated:
        data += [_best_so_far(rated, last=max(trial.number for trial in trials)), _rated_points(rated)]
    data += _no_results([trial for trial in trials if _ended_badly(trial)],
                        x=lambda trial: trial.number, y=lambda _: 0)
    baseline = next((rate for trial, rate in rated if trial.number == 0), None)
    shapes, annotations = _horizontal(baseline.tokens_per_second, "baseline") if baseline else ([], [])
    layout = _layout("trial", _throughput_title(trials), shapes=shapes, annotations=annotations)
    layout["xaxis"] |= {"dtick": 1} if len(trials) <= 15 else {}
    layout["yaxis"] |= {"rangemode": "tozero"}
    return {"data": data, "layout": layout}


def throughput_against_memory(trials: Sequence[Trial], *, limit_bytes: int | None,
                              best_number: int | None = None) -> Figure:
    """Tokens per second over peak device memory, one symbol per ZeRO stage; the memory limit as a line.

    A trial without a measurement stands on the axis, at its predicted peak.

    Args:
        best_number: the trial to ring; the fastest one where not given.
    """
    peaks = {trial.number: peak for trial in trials if (peak := _peak_or_prediction(trial)) is not None}
    scale, unit = fmt.byte_unit(max([*peaks.values(), limit_bytes or 0], default=0))
    best = next((trial for trial in trials if trial.number == best_number), None) or fastest(tuple(trials))
    data: list[Figure] = []
    for stage in range(4):
        points = [(trial, rate) for trial in trials if trial.config.zero_stage == stage
                  and trial.number in peaks and (rate := shown_throughput(trial)) is not None]
        if points:
            data.append(_stage_points(points, stage, [peaks[trial.number] / scale for trial, _ in points]))
    if best is not None and best.number in peaks and shown_throughput(best) is not None:
        data.append(_ring(peaks[best.number] / scale, best))
    data += _no_results([trial for trial in trials if _ended_badly(trial) and trial.number in peaks],
                        x=lambda trial: peaks[trial.number] / scale, y=lambda _: 0)
    shapes, annotations = _vertical(limit_bytes / scale, "memory limit") if limit_bytes else ([], [])
    layout = _layout(f"peak device memory per rank ({unit})", _throughput_title(trials),
                     shapes=shapes, annotations=annotations)
    layout["xaxis"] |= {"rangemode": "tozero"}
    layout["yaxis"] |= {"rangemode": "tozero"}
    return {"data": data, "layout": layout}


def step_times(trial: Trial) -> Figure:
    """Milliseconds of every step, run by run; discarded warm-up steps hollow, the mean that counts dashed."""
    data: list[Figure] = []
    for index, run in enumerate(trial.measurements):
        name = _run_name(index, run)
        colour = f"var(--series-{index % 4})"
        warm = len(run.warmup_seconds)
        if warm:
            data.append(_points(range(warm), [1e3 * value for value in run.warmup_seconds], f"warm-up, {name}",
                                marker={"color": colour, "symbol": "circle-open", "size": 7})
                        | {"legendgroup": name, "showlegend": False})
        data.append(_points(range(warm, warm + len(run.step_seconds)), [1e3 * value for value in run.step_seconds],
                            name, marker={"color": colour, "size": 7}) | {"legendgroup": name})
    for entry in data:
        entry["hovertemplate"] = "step %{x}: %{y:.4g} ms<extra>%{fullData.name}</extra>"
    rate = shown_throughput(trial)
    shapes, annotations = _horizontal(1e3 * rate.step_seconds, "trimmed mean") if rate else ([], [])
    layout = _layout("optimizer step of the run", "milliseconds", shapes=shapes, annotations=annotations)
    layout["yaxis"] |= {"rangemode": "tozero"}
    return {"data": data, "layout": layout}


def losses(trial: Trial) -> Figure:
    """The loss of every step, warm-up included; a gap where it was not finite."""
    data: list[Figure] = []
    for index, run in enumerate(trial.measurements):
        name = _run_name(index, run)
        data.append({"type": "scatter", "mode": "lines+markers", "name": name, "x": list(range(len(run.losses))),
                     "y": list(run.losses), "connectgaps": False,
                     "line": {"color": f"var(--series-{index % 4})", "width": 1.5}, "marker": {"size": 5},
                     "hovertemplate": "step %{x}: loss %{y:.6g}<extra>%{fullData.name}</extra>"})
    return {"data": data, "layout": _layout("optimizer step of the run", "loss")}


def _best_so_far(rated: Sequence[tuple[Trial, Throughput]], *, last: int) -> Figure:
    xs: list[int] = []
    ys: list[float] = []
    for trial, rate in rated:
        if not ys or rate.tokens_per_second > ys[-1]:
            xs.append(trial.number)
            ys.append(rate.tokens_per_second)
    if xs[-1] < last:
        xs.append(last)
        ys.append(ys[-1])
    return {"type": "scatter", "mode": "lines", "name": "best so far", "x": xs, "y": ys, "hoverinfo": "skip",
            "line": {"color": "var(--accent)", "width": 2, "shape": "hv"}}


def _rated_points(rated: Sequence[tuple[Trial, Throughput]]) -> Figure:
    points = _points([trial.number for trial, _ in rated], [rate.tokens_per_second for _, rate in rated], "measured",
                     marker={"color": "var(--good)", "size": 9, "line": {"color": "var(--surface)", "width": 1}})
    return points | {
        "error_y": {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3, "color": "var(--good)",
                    "array": [max(0.0, rate.interval[1] - rate.tokens_per_second) for _, rate in rated],
                    "arrayminus": [max(0.0, rate.tokens_per_second - rate.interval[0]) for _, rate in rated]},
        "text": [_hover(trial) for trial, _ in rated], "hovertemplate": "%{text}<extra></extra>",
        "customdata": [trial.number for trial, _ in rated]}


def _stage_points(points: Sequence[tuple[Trial, Throughput]], stage: int, peaks: list[float]) -> Figure:
    return _points(peaks, [rate.tokens_per_second for _, rate in points], f"ZeRO {stage}",
                   marker={"color": f"var(--series-{stage})", "symbol": _STAGE_SYMBOLS[stage], "size": 10}) | {
        "text": [_hover(trial) for trial, _ in points], "hovertemplate": "%{text}<extra></extra>",
        "customdata": [trial.number for trial, _ in points]}


def _ring(peak: float, best: Trial) -> Figure:
    rate = shown_throughput(best)
    assert rate is not None
    return _points([peak], [rate.tokens_per_second], "best",
                   marker={"color": "var(--text)", "symbol": "circle-open", "size": 19, "line": {"width": 2}}) | {
        "hoverinfo": "skip"}


def _no_results(trials: Sequence[Trial], *, x: Any, y: Any) -> list[Figure]:
    data = []
    for tone, symbol in _NO_RESULT_SYMBOLS.items():
        of_tone = [trial for trial in trials if trial_cue(trial).tone == tone]
        if of_tone:
            data.append(_points([x(trial) for trial in of_tone], [y(trial) for trial in of_tone],
                                _NO_RESULT_NAMES[tone],
                                marker={"color": f"var(--{tone})", "symbol": symbol, "size": 10}) | {
                "cliponaxis": False, "customdata": [trial.number for trial in of_tone],
                "text": [_hover(trial) for trial in of_tone], "hovertemplate": "%{text}<extra></extra>"})
    return data


def _ended_badly(trial: Trial) -> bool:
    return trial.outcome not in (None, Outcome.OK)


def _peak_or_prediction(trial: Trial) -> int | None:
    measured = trial.peak_device_bytes
    if measured is None and _ended_badly(trial) and trial.prediction is not None:
        return trial.prediction.peak_device_bytes
    return measured


def _throughput_title(trials: Sequence[Trial]) -> str:
    rates = [rate for trial in trials if (rate := shown_throughput(trial)) is not None]
    return "samples per second" if rates and rate_unit(rates[0]) == "samples/s" else "tokens per second"


def _hover(trial: Trial) -> str:
    """Escaped lines about one trial."""
    config, rate, peak = trial.config, shown_throughput(trial), trial.peak_device_bytes
    lines = [f"trial {trial.number} · {trial_cue(trial).label}"]
    if rate is not None:
        lines.append(f"{fmt.rate(rate.tokens_per_second, rate_unit(rate))} · {fmt.seconds(rate.step_seconds)} per step")
    if peak is not None:
        lines.append(f"{fmt.number_bytes(peak)} peak per rank")
    lines.append(f"ZeRO {config.zero_stage} · {config.precision} · micro-batch {config.micro_batch_size} × "
                 f"{config.gradient_accumulation_steps}")
    if trial.detail and rate is None:
        lines.append(trial.detail if len(trial.detail) <= 90 else trial.detail[:90] + " …")
    return "<br>".join(html.escape(line, quote=False).replace("\n", " ") for line in lines)


def _run_name(index: int, run: Measurement) -> str:
    name = "first run" if index == 0 else f"repeat {index}"
    return f"{name} (contended)" if run.contended else name


def _points(x: Sequence[float], y: Sequence[float], name: str, *, marker: Figure) -> Figure:
    return {"type": "scatter", "mode": "markers", "name": name, "x": list(x), "y": list(y), "marker": marker}


def _horizontal(y: float, label: str) -> tuple[list[Figure], list[Figure]]:
    return ([{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y,
              "line": {"color": "var(--muted)", "width": 1.2, "dash": "dash"}}],
            [{"xref": "paper", "x": 1, "xanchor": "right", "y": y, "yanchor": "bottom", "text": label,
              "showarrow": False, "font": {"size": 11, "color": "var(--text-soft)"}}])


def _vertical(x: float, label: str) -> tuple[list[Figure], list[Figure]]:
    return ([{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x,
              "line": {"color": "var(--memory)", "width": 1.5, "dash": "dot"}}],
            [{"yref": "paper", "y": 1, "yanchor": "top", "x": x, "xanchor": "right", "text": label, "textangle": -90,
              "showarrow": False, "font": {"size": 11, "color": "var(--memory)"}}])


def _layout(x_title: str, y_title: str, *, shapes: Sequence[Figure] = (),
            annotations: Sequence[Figure] = ()) -> Figure:
    axis = {"gridcolor": "var(--line)", "zerolinecolor": "var(--line-strong)", "linecolor": "var(--line-strong)",
            "tickcolor": "var(--line-strong)", "automargin": True, "tickfont": {"size": 11}}
    return {
        "xaxis": axis | {"title": {"text": x_title, "font": {"size": 12}, "standoff": 8}, "showgrid": False,
                         "zeroline": False},
        "yaxis": axis | {"title": {"text": y_title, "font": {"size": 12}, "standoff": 8}, "tickformat": ",~r"},
        "shapes": list(shapes), "annotations": list(annotations),
        "font": {"family": "var(--font)", "color": "var(--text-soft)", "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8, "autoexpand": True}, "hovermode": "closest", "dragmode": False,
        "hoverlabel": {"bgcolor": "var(--surface-raised)", "bordercolor": "var(--line-strong)", "align": "left",
                       "font": {"color": "var(--text)", "size": 12}},
        "showlegend": False}
