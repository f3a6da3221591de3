//! `hoistway moe generate`.

use super::arguments;
use crate::{failure::Failure, output};
use hoistway_experts::trace::Synthetic;
use std::{
    fs::File,
    io::{BufWriter, Write},
};

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
    let Some(path) = &arguments.output else {
        let mut text = Vec::new();
        trace.write(arguments.format, &mut text).map_err(Failure::output)?;
        return output::write(&text);
    };
    let mut file = BufWriter::new(File::create(path).map_err(Failure::output)?);
    trace.write(arguments.format, &mut file).and_then(|()| file.flush()).map_err(Failure::output)
}
