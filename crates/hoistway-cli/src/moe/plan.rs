//! `hoistway moe plan`.

use super::{arguments, traces::notes};
use crate::{failure::Failure, output};
use bytesize::ByteSize;
use hoistway::counted;
use hoistway_experts::{
    catalog::ExpertCatalog,
    pack::{PackChoice, Packing},
    policy::CatalogShape,
    replay::{Budget, Outcome},
};
use serde::Serialize;

/// The part of a model that fits a memory. Sizes are in bytes.
#[derive(Debug, Serialize)]
struct Plan {
    memory_bytes: u64,
    /// All that is not of an expert.
    dense_bytes: u64,
    experts: usize,
    expert_bytes: u64,
    experts_per_token: u32,
    /// Bytes that one token uses in all layers together.
    cycle_bytes: u64,
    /// The most that one token uses in one layer.
    layer_demand_bytes: u64,
    budget_bytes: u64,
    budget_cycles: f64,
    /// The share of the experts that the budget holds, up to 1.
    residency: f64,
    /// Whether the budget is below one token's cycle.
    cliff: bool,
    /// With a trace.
    expected: Option<Outcome>,
    notes: Vec<String>,
}

pub(super) fn run(arguments: &arguments::Plan) -> Result<(), Failure> {
    let checkpoint = arguments.paths.open()?;
    let catalog = ExpertCatalog::of_checkpoint(&checkpoint, arguments.experts_per_token)?;
    let catalog = catalog.with_pack(&PackChoice::Auto)?;
    let plan = plan(&catalog, arguments)?;
    if arguments.json { output::write_json(&plan) } else { output::write_text(&plan.as_text()) }
}

fn plan(catalog: &ExpertCatalog, arguments: &arguments::Plan) -> Result<Plan, Failure> {
    let Some(last) = catalog.layers().last() else {
        return Err(Failure::told(
            "the checkpoint has no experts: only models with experts can be planned",
            4,
        ));
    };
    let Some(cycle_bytes) = catalog.token_cycle_bytes() else {
        let message = "the model does not say how many experts a token uses: give --experts-per-token";
        return Err(Failure::told(message, 2));
    };
    let (memory_bytes, dense_bytes) = (arguments.memory, catalog.total_dense_bytes());
    let demand = |layer| catalog.layer_demand_bytes(layer).unwrap_or_default();
    let layer_demand_bytes = (0..=last).map(demand).max().unwrap_or_default();
    let fixed_bytes = dense_bytes.saturating_add(layer_demand_bytes);
    let largest = catalog.layers().map(|layer| catalog.expert_bytes(layer)).max().unwrap_or_default();
    let budget_bytes = memory_bytes.saturating_sub(fixed_bytes);
    if budget_bytes < largest {
        return Err(Failure::told(
            format!(
                "{} does not hold one expert of {}: tensors outside experts take {}, and the experts of one token in one layer {}",
                ByteSize(memory_bytes),
                ByteSize(largest),
                ByteSize(dense_bytes),
                ByteSize(layer_demand_bytes)
            ),
            7,
        ));
    }
    let (expert_bytes, shape) = (catalog.total_expert_bytes(), CatalogShape::try_from(catalog)?);
    let budget_cycles = budget_bytes as f64 / cycle_bytes.max(1) as f64;
    let mut plan = Plan {
        memory_bytes,
        dense_bytes,
        experts: catalog.experts().len(),
        expert_bytes,
        experts_per_token: shape.experts_per_token(),
        cycle_bytes,
        layer_demand_bytes,
        budget_bytes,
        budget_cycles,
        residency: (budget_bytes as f64 / expert_bytes.max(1) as f64).min(1.0),
        cliff: budget_bytes < cycle_bytes,
        expected: None,
        notes: Vec::new(),
    };
    match catalog.packing() {
        Packing::Used { path } => {
            plan.notes.push(format!("stores in memory of the host read experts from {}", path.display()))
        }
        Packing::Refused { path, reason } => {
            plan.notes.push(format!("packed experts are not used: {}: {reason}", path.display()));
        }
        _ => {}
    }
    if let Some(path) = &arguments.trace {
        let trace = arguments.reading.open(path)?;
        let counts =
            |shape: &CatalogShape| shape.layers().iter().map(|layer| layer.experts).collect::<Vec<_>>();
        if counts(trace.shape()) != counts(&shape)
            || trace.shape().experts_per_token() != shape.experts_per_token()
        {
            plan.notes
                .push("the trace is of a model with other layers or experts: its rate may not apply".into());
        }
        plan.notes.extend(notes(&trace));
        let budget = Budget::Cycles(budget_cycles);
        plan.expected = Some(arguments.reading.replay(&trace)?.run(&arguments.policy, budget)?);
    }
    Ok(plan)
}

impl Plan {
    fn as_text(&self) -> String {
        let line = |name: &str, bytes: u64, what: String| {
            format!("{name:<12} {:>10}  {what}", ByteSize(bytes).to_string())
        };
        let share = self.residency * 100.0;
        let mut lines = vec![
            line("memory", self.memory_bytes, String::new()),
            line("dense", self.dense_bytes, "tensors outside experts".into()),
            line(
                "one layer",
                self.layer_demand_bytes,
                "the experts that one token uses in it, at most".into(),
            ),
            line(
                "budget",
                self.budget_bytes,
                format!("the rest: {:.2} token cycles, {share:.1} % of the experts", self.budget_cycles),
            ),
            line(
                "token cycle",
                self.cycle_bytes,
                format!("the experts that one token uses in all layers, {} of each", self.experts_per_token),
            ),
            line("experts", self.expert_bytes, counted(self.experts, "expert", "experts")),
        ];
        if let Some(expected) = &self.expected {
            lines.push(format!(
                "{:<12} {:>10}  with {}: {:.1} % of the uses find their expert resident, {:.1} experts are read per token",
                "expected",
                format!("{:.1} MiB", expected.mib_per_token),
                expected.policy,
                expected.hit_rate * 100.0,
                expected.faults_per_token,
            ));
        }
        if self.budget_bytes >= self.expert_bytes {
            lines.push("note: everything fits: load the model instead".into());
        } else if self.cliff {
            lines.push(
                "note: the budget is below one token's cycle: most experts are read for each token".into(),
            );
        }
        lines.extend(self.notes.iter().map(|note| format!("note: {note}")));
        lines.join("\n")
    }
}
