"""How states and outcomes are told: a label, an icon and a tone, so that colour is never the only cue."""

from dataclasses import dataclass

from autotune.domain.study import Study, StudyPhase, StudyState, Trial, TrialRole
from engine.report import Outcome
from engine.spec import GptSpec, HuggingFaceSpec, ModelSpec, PythonSpec, VitSpec


@dataclass(frozen=True)
class Cue:
    """A label, the name of an icon in ``icons.html`` and a tone (a CSS class ``tone-...``)."""

    label: str
    icon: str
    tone: str


OUTCOMES: dict[Outcome, Cue] = {
    Outcome.OK: Cue("ok", "check", "good"),
    Outcome.PRUNED: Cue("stopped early", "scissors", "muted"),
    Outcome.OOM_DEVICE: Cue("out of device memory", "memory", "memory"),
    Outcome.OOM_HOST: Cue("out of host memory", "memory", "memory"),
    Outcome.TIMEOUT: Cue("timeout", "clock", "bad"),
    Outcome.CRASHED: Cue("crashed", "cross", "bad"),
    Outcome.NON_FINITE: Cue("non-finite loss", "warning", "bad"),
    Outcome.NUMERICS_DRIFT: Cue("numerics drift", "warning", "bad"),
    Outcome.IMPLAUSIBLE: Cue("implausible", "warning", "bad"),
    Outcome.CANCELLED: Cue("cancelled", "slash", "muted"),
}
RUNNING = Cue("running", "spinner", "active")

STATES: dict[StudyState, Cue] = {
    StudyState.QUEUED: Cue("queued", "clock", "muted"),
    StudyState.RUNNING: RUNNING,
    StudyState.SUCCEEDED: Cue("succeeded", "check", "good"),
    StudyState.FAILED: Cue("failed", "cross", "bad"),
    StudyState.CANCELLED: Cue("cancelled", "slash", "muted"),
}

PHASES: dict[StudyPhase, tuple[str, str]] = {
    StudyPhase.PROBING: ("Probe", "reading the model's size and activations, without a device"),
    StudyPhase.CALIBRATING: ("Calibrate", "measuring what the hardware can do"),
    StudyPhase.SEARCHING: ("Search", "running trials on the devices"),
    StudyPhase.CONFIRMING: ("Confirm", "measuring the finalists again, interleaved"),
}

MEASURED_PARTS: dict[str, str] = {
    "data": "data", "forward": "forward", "backward": "backward", "step": "optimizer step",
    "host_step": "host optimizer", "transfer": "host transfers"}

ROLES: dict[TrialRole, str] = {
    TrialRole.BASELINE: "baseline",
    TrialRole.DEFAULT: "default",
    TrialRole.REFERENCE: "reference",
    TrialRole.SUGGESTED: "suggested",
}


def study_cue(study: Study) -> Cue:
    """How a study stands; one that was asked to stop says so until it has."""
    if study.cancel_requested and not study.state.is_final:
        return Cue("cancelling", "spinner", "active")
    return STATES[study.state]


def trial_cue(trial: Trial) -> Cue:
    """How a trial ended, or that it runs."""
    return RUNNING if trial.outcome is None else OUTCOMES[trial.outcome]


def describe_model(spec: ModelSpec) -> str:
    """A model in one line."""
    match spec:
        case GptSpec():
            return (f"GPT · {spec.layers} layers · hidden {spec.hidden:,} · {spec.heads} heads · "
                    f"vocabulary {spec.vocab:,} · {spec.sequence_length:,} tokens")
        case VitSpec():
            return (f"ViT · {spec.layers} layers · hidden {spec.hidden:,} · {spec.heads} heads · "
                    f"image {spec.image_size}×{spec.image_size} px · patch {spec.patch_size} px")
        case HuggingFaceSpec():
            return f"Hugging Face · {spec.config['model_type']} · {spec.head.replace('_', ' ')}"
        case PythonSpec():
            return f"Python · {spec.entry_point}"
