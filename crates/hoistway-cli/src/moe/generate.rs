//! `hoistway moe generate`.

use super::arguments;
use crate::{failure::Failure, output};
use hoistway::save::{refuse_others, write_whole};
use hoistway_experts::trace::Synthetic;

pub(super) fn run(arguments: &arguments::Generate) -> Result<(), Failure> {
    let synthetic = Synthetic {
        layers: arguments.layers,
        experts: arguments.experts,
        experts_per_token: arguments.experts_per_token,
        expert_bytes: arguments.expert_bytes,
        prefill_tokens: arguments.prefill,
        tokens: arguments.tokens,
        seed: arguments.seed,
        ..Synthetic::new(arguments.pattern())
    };
    let wrong = |error| Failure::told(format!("{error}"), 2);
    let trace = synthetic.generate().map_err(wrong)?;
    let mut text = Vec::new();
    trace.write(arguments.format, &mut text).map_err(Failure::output)?;
    match &arguments.output {
        None => output::write(&text),
        Some(path) => {
            refuse_others(path, "a trace", |begins| {
                let beginnings = ["{\"hoistway_trace\":", "#route_trace", "turn,phase,"];
                beginnings.iter().any(|beginning| begins.starts_with(beginning.as_bytes()))
            })?;
            Ok(write_whole(path, &text)?)
        }
    }
}
