//! Traces as CSV: version 1 of the traces of routes of BigMoeOnEdge (`docs/bench-data` in its repository).
//!
//! Comments describe the model: `# route_trace v1`, `# model=NAME n_layer=N n_expert=N n_expert_used=N`, and for each layer
//! `# layer=N expert_bytes=N`. The first line without `#` names the columns. `step`, `layer` and `expert` are needed;
//! `turn`, `phase` (0 prefill, 1 decode, which is the default), `weight` and `expert_bytes` (0, or the size of the expert)
//! may be there, and others are ignored. No field is quoted.
#![forbid(unsafe_code)]

use super::{Draft, Lines, Phase, Trace, TraceError, TraceProblem, draft::Row};
use std::{
    io::{self, BufRead, Write},
    str::FromStr,
};

/// Most columns that are looked at.
const MAX_COLUMNS: usize = 64;
const NAMES: &str = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes";

/// The column of each value.
struct Columns {
    turn: Option<usize>,
    phase: Option<usize>,
    step: usize,
    layer: usize,
    expert: usize,
    weight: Option<usize>,
    expert_bytes: Option<usize>,
    count: usize,
}

pub(super) fn read<R: BufRead>(lines: &mut Lines<'_, R>) -> Result<Draft, TraceError> {
    let mut draft = Draft::default();
    let mut columns = None;
    loop {
        let Some((number, line)) = lines.next()? else { return Ok(draft) };
        let taken = match (line.strip_prefix('#'), &columns) {
            (Some(comment), _) => read_comment(&mut draft, comment),
            (None, None) => Columns::parse(line).map(|found| columns = Some(found)),
            (None, Some(columns)) => read_row(&mut draft, columns, line, number),
        };
        taken.map_err(|problem| lines.invalid(problem))?;
    }
}

fn read_comment(draft: &mut Draft, comment: &str) -> Result<(), TraceProblem> {
    let comment = comment.trim();
    if let Some(version) = comment.strip_prefix("route_trace") {
        return match version.trim() {
            "v1" => Ok(()),
            found => Err(TraceProblem::Version { found: found.chars().take(40).collect() }),
        };
    }
    let value = |key: &str| {
        let mut pairs = comment.split_ascii_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.find(|(name, _)| *name == key).map(|(_, value)| value)
    };
    let experts = value("n_expert").map(|text| number("n_expert", text)).transpose()?;
    if let Some(layer) = value("layer") {
        let expert_bytes = value("expert_bytes").map(|text| number("expert_bytes", text)).transpose()?;
        let layer = draft.layer(number("layer", layer)?)?;
        layer.expert_bytes = expert_bytes.or(layer.expert_bytes);
        layer.experts = experts.or(layer.experts);
        return Ok(());
    }
    draft.experts = experts.or(draft.experts);
    if let Some(text) = value("n_layer") {
        draft.layer_count = Some(number("n_layer", text)?);
    }
    if let Some(text) = value("n_expert_used") {
        draft.experts_per_token = Some(number("n_expert_used", text)?);
    }
    if let Some(model) = value("model") {
        draft.model = Some(model.to_owned());
    }
    Ok(())
}

impl Columns {
    fn parse(line: &str) -> Result<Self, TraceProblem> {
        let names: Vec<&str> = line.split(',').map(str::trim).take(MAX_COLUMNS + 1).collect();
        if names.len() > MAX_COLUMNS {
            return Err(TraceProblem::Fields { found: names.len(), columns: MAX_COLUMNS });
        }
        let find = |column: &str| names.iter().position(|name| *name == column);
        let need = |column: &'static str| find(column).ok_or(TraceProblem::NoColumn { column });
        Ok(Self {
            turn: find("turn"),
            phase: find("phase"),
            step: need("step")?,
            layer: need("layer")?,
            expert: need("expert")?,
            weight: find("weight"),
            expert_bytes: find("expert_bytes"),
            count: names.len(),
        })
    }
}

fn read_row(
    draft: &mut Draft,
    columns: &Columns,
    line: &str,
    number_of_line: u32,
) -> Result<(), TraceProblem> {
    let mut fields = [""; MAX_COLUMNS];
    let mut found = 0;
    for field in line.split(',') {
        if let Some(place) = fields.get_mut(found) {
            *place = field.trim();
        }
        found += 1;
    }
    if found != columns.count {
        return Err(TraceProblem::Fields { found, columns: columns.count });
    }
    let phase = match columns.phase.map(|at| fields[at]) {
        None | Some("1") => Phase::Decode,
        Some("0") => Phase::Prefill,
        Some(other) => return Err(TraceProblem::field("phase", other, "0 (prefill) or 1 (decode)")),
    };
    let layer = number("layer", fields[columns.layer])?;
    draft.push(Row {
        turn: columns.turn.map_or(Ok(0), |at| number("turn", fields[at]))?,
        phase,
        step: number("step", fields[columns.step])?,
        layer,
        expert: number("expert", fields[columns.expert])?,
        weight: columns.weight.map_or(Ok(1.0), |at| weight(fields[at]))?,
        line: number_of_line,
    })?;
    if let Some(at) = columns.expert_bytes {
        let bytes = number("expert_bytes", fields[at])?;
        let layer = draft.layer(layer)?;
        layer.row_bytes = layer.row_bytes.max(bytes);
    }
    Ok(())
}

fn number<T: FromStr>(field: &'static str, text: &str) -> Result<T, TraceProblem> {
    text.parse().map_err(|_| TraceProblem::field(field, text, "a whole number in its range"))
}

fn weight(text: &str) -> Result<f32, TraceProblem> {
    let weight = text.parse().ok().filter(|weight: &f32| weight.is_finite());
    weight.ok_or_else(|| TraceProblem::field("weight", text, "a finite number"))
}

pub(super) fn write(trace: &Trace, output: &mut dyn Write) -> io::Result<()> {
    let shape = trace.shape();
    writeln!(output, "# route_trace v1")?;
    // Values end at spaces.
    let model = trace.model().map(|model| model.split_whitespace().collect::<Vec<_>>().join("_"));
    let model = model.map(|model| format!("model={model} ")).unwrap_or_default();
    let (layers, used) = (shape.layers().len(), shape.experts_per_token());
    writeln!(output, "# {model}n_layer={layers} n_expert_used={used}")?;
    for (number, layer) in shape.layers().iter().enumerate().filter(|(_, layer)| layer.experts > 0) {
        writeln!(output, "# layer={number} n_expert={} expert_bytes={}", layer.experts, layer.expert_bytes)?;
    }
    writeln!(output, "{NAMES}")?;
    for visit in trace.visits() {
        let phase = u8::from(visit.phase == Phase::Decode);
        let bytes = shape.layers()[visit.layer as usize].expert_bytes;
        for (slot, (expert, weight)) in visit.experts.iter().enumerate() {
            writeln!(
                output,
                "{},{phase},{},{},{slot},{expert},{weight},0,{bytes}",
                visit.turn, visit.step, visit.layer
            )?;
        }
    }
    Ok(())
}
