//! Traces as JSON lines: an object that describes the model, then one for each token's visit of a layer.
//!
//! ```json
//! {"hoistway_trace": 1, "model": "NAME", "experts_per_token": 8, "layers": [{"layer": 0, "experts": 128, "expert_bytes": 3059712}]}
//! {"turn": 0, "phase": "decode", "step": 28, "layer": 0, "experts": [49, 19], "weights": [0.7, 0.3]}
//! ```
//!
//! `model`, `turn` (0), `phase` (`decode`) and `weights` (1) may be left out. Keys that are not known are errors.
#![forbid(unsafe_code)]

use super::{Draft, Lines, Phase, Trace, TraceError, TraceProblem, draft::Row};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Write};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    /// The version of the format. Traces from before the project's renaming have its former name.
    #[serde(alias = "windlass_trace")]
    hoistway_trace: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    experts_per_token: u32,
    layers: Vec<HeaderLayer>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderLayer {
    layer: u32,
    experts: u32,
    #[serde(default)]
    expert_bytes: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(default)]
    turn: u32,
    #[serde(default = "decode")]
    phase: Phase,
    step: u32,
    layer: u32,
    experts: Vec<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weights: Option<Vec<f32>>,
}

fn decode() -> Phase {
    Phase::Decode
}

pub(super) fn read<R: BufRead>(lines: &mut Lines<'_, R>) -> Result<Draft, TraceError> {
    let mut draft = Draft::default();
    let mut has_header = false;
    loop {
        let Some((number, line)) = lines.next()? else { return Ok(draft) };
        let taken = if std::mem::replace(&mut has_header, true) {
            read_visit(&mut draft, line, number)
        } else {
            read_header(&mut draft, line)
        };
        taken.map_err(|problem| lines.invalid(problem))?;
    }
}

fn parse<'a, T: Deserialize<'a>>(line: &'a str) -> Result<T, TraceProblem> {
    // The parser takes arrays for structures, too.
    if !line.starts_with('{') {
        return Err(TraceProblem::Json { reason: "it does not begin with '{'".into() });
    }
    // The position that the parser adds is that in the line.
    serde_json::from_str(line)
        .map_err(|error| TraceProblem::Json { reason: error.to_string().chars().take(200).collect() })
}

fn read_header(draft: &mut Draft, line: &str) -> Result<(), TraceProblem> {
    let header: Header = parse(line)?;
    if header.hoistway_trace != 1 {
        return Err(TraceProblem::Version { found: header.hoistway_trace.to_string() });
    }
    draft.model = header.model;
    draft.experts_per_token = Some(header.experts_per_token);
    // Layers that are not listed have no experts.
    draft.experts = Some(0);
    for HeaderLayer { layer, experts, expert_bytes } in header.layers {
        let of_layer = draft.layer(layer)?;
        (of_layer.experts, of_layer.expert_bytes) = (Some(experts), Some(expert_bytes));
        draft.layer_count = draft.layer_count.max(Some(layer + 1));
    }
    Ok(())
}

fn read_visit(draft: &mut Draft, line: &str, number: u32) -> Result<(), TraceProblem> {
    let Line { turn, phase, step, layer, experts, weights } = parse(line)?;
    if let Some(weights) = &weights
        && weights.len() != experts.len()
    {
        return Err(TraceProblem::Weights { experts: experts.len(), weights: weights.len() });
    }
    for (at, &expert) in experts.iter().enumerate() {
        let weight = weights.as_ref().map_or(1.0, |weights| weights[at]);
        if !weight.is_finite() {
            return Err(TraceProblem::field("weights", &weight.to_string(), "a finite number"));
        }
        draft.push(Row { turn, phase, step, layer, expert, weight, line: number })?;
    }
    Ok(())
}

pub(super) fn write(trace: &Trace, output: &mut dyn Write) -> io::Result<()> {
    let shape = trace.shape();
    let layers = (0..).zip(shape.layers());
    let header = Header {
        hoistway_trace: 1,
        model: trace.model().map(ToOwned::to_owned),
        experts_per_token: shape.experts_per_token(),
        layers: layers
            .map(|(number, layer)| HeaderLayer {
                layer: number,
                experts: layer.experts,
                expert_bytes: layer.expert_bytes,
            })
            .collect(),
    };
    write_line(&header, output)?;
    trace.visits().try_for_each(|visit| {
        let (experts, weights) = visit.experts.iter().copied().unzip();
        let line = Line {
            turn: visit.turn,
            phase: visit.phase,
            step: visit.step,
            layer: visit.layer,
            experts,
            weights: Some(weights),
        };
        write_line(&line, output)
    })
}

fn write_line(line: &impl Serialize, output: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer(&mut *output, line)?;
    output.write_all(b"\n")
}
