//! Rows of a trace in any order, which become a trace if they agree with each other and with what it says of its model.
#![forbid(unsafe_code)]

use super::{Holes, MAX_CHOICES, Phase, Recorded, Trace, TraceOptions, TraceProblem};
use crate::policy::{CatalogShape, LayerShape};
use std::collections::BTreeMap;

/// One choice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) turn: u32,
    pub(super) phase: Phase,
    pub(super) step: u32,
    pub(super) layer: u32,
    pub(super) expert: u32,
    pub(super) weight: f32,
    /// The line that it was read from, for errors.
    pub(super) line: u32,
}

/// One layer, as a trace describes it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LayerDraft {
    pub(super) experts: Option<u32>,
    pub(super) expert_bytes: Option<u64>,
    /// The most bytes that a row says of an expert.
    pub(super) row_bytes: u64,
    /// One more than the highest expert that is chosen; 0 if none is.
    pub(super) chosen: u32,
}

/// A trace as far as it was read.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) model: Option<String>,
    pub(super) layer_count: Option<u32>,
    pub(super) experts: Option<u32>,
    pub(super) experts_per_token: Option<u32>,
    pub(super) layers: BTreeMap<u32, LayerDraft>,
    pub(super) rows: Vec<Row>,
}

/// A problem, with its line if it is in one.
type Wrong = (Option<u64>, TraceProblem);

impl Draft {
    /// The draft of a layer; its number must be possible in a model.
    pub(super) fn layer(&mut self, layer: u32) -> Result<&mut LayerDraft, TraceProblem> {
        if layer as usize >= CatalogShape::MAX_LAYERS {
            return Err(TraceProblem::NoLayer { layer, layers: CatalogShape::MAX_LAYERS as u32 });
        }
        Ok(self.layers.entry(layer).or_default())
    }

    pub(super) fn push(&mut self, row: Row) -> Result<(), TraceProblem> {
        let Row { layer, expert, .. } = row;
        if expert >= CatalogShape::MAX_EXPERTS {
            return Err(TraceProblem::NoExpert { layer, expert, experts: CatalogShape::MAX_EXPERTS });
        }
        if self.rows.len() == MAX_CHOICES {
            return Err(TraceProblem::TooLong);
        }
        let of_layer = self.layer(layer)?;
        of_layer.chosen = of_layer.chosen.max(expert + 1);
        self.rows.push(row);
        Ok(())
    }

    /// Checks everything, and puts it in order.
    pub(super) fn finish(mut self, options: &TraceOptions) -> Result<Trace, Wrong> {
        if self.rows.is_empty() {
            return Err((None, TraceProblem::Empty));
        }
        self.check_rows()?;
        let layers = self.layer_shapes(options)?;
        // Layers whose experts are known, visited or not.
        let known = self
            .layers
            .values()
            .filter(|layer| layer.chosen > 0 || layer.expert_bytes.is_some_and(|bytes| bytes > 0));
        let known = known.count();
        // Tokens keep the order of their choices.
        self.rows.sort_by_key(|row| (row.turn, row.phase, row.step, row.layer));
        let (visits, most) = self.visits()?;
        let experts_per_token = self.experts_per_token.unwrap_or(most);
        let shape = CatalogShape::new(experts_per_token, layers).map_err(|error| (None, error.into()))?;
        let holes = Holes::of(&shape, &visits, known);
        let choices = self.rows.iter().map(|row| (row.expert, row.weight)).collect();
        let mut visited = self.layers.iter().filter(|(_, layer)| layer.chosen > 0);
        let states_experts = visited.all(|(number, _)| self.experts_of(*number).is_some());
        Ok(Trace { model: self.model, shape, states_experts, holes, visits, choices })
    }

    /// Checks that the model has each layer and expert.
    fn check_rows(&self) -> Result<(), Wrong> {
        for row in &self.rows {
            let &Row { layer, expert, line, .. } = row;
            if let Some(layers) = self.layer_count
                && layer >= layers
            {
                return Err((Some(line.into()), TraceProblem::NoLayer { layer, layers }));
            }
            if let Some(experts) = self.experts_of(layer)
                && expert >= experts
            {
                return Err((Some(line.into()), TraceProblem::NoExpert { layer, expert, experts }));
            }
        }
        Ok(())
    }

    /// The experts of a layer, as the trace says.
    fn experts_of(&self, layer: u32) -> Option<u32> {
        self.layers.get(&layer).and_then(|layer| layer.experts).or(self.experts)
    }

    /// The layers; those that are not visited are without experts.
    fn layer_shapes(&self, options: &TraceOptions) -> Result<Vec<LayerShape>, Wrong> {
        let mut layers = Vec::new();
        for (&number, layer) in self.layers.iter().filter(|(_, layer)| layer.chosen > 0) {
            let said = layer.expert_bytes.filter(|&bytes| bytes > 0);
            let in_rows = (layer.row_bytes > 0).then_some(layer.row_bytes);
            let expert_bytes = said.or(in_rows).or(options.expert_bytes);
            let expert_bytes = expert_bytes.ok_or((None, TraceProblem::NoExpertBytes { layer: number }))?;
            layers.resize(number as usize, LayerShape::default());
            let experts = self.experts_of(number).unwrap_or(layer.chosen);
            layers.push(LayerShape { experts, expert_bytes });
        }
        if let Some(count) = self.layer_count {
            // Checked against the rows; a count that no model has is refused with the shape.
            let count = (count as usize).min(CatalogShape::MAX_LAYERS + 1);
            layers.resize(count.max(layers.len()), LayerShape::default());
        }
        Ok(layers)
    }

    /// Each token's visit of each layer, of rows that are in order, and the most experts of one.
    fn visits(&self) -> Result<(Vec<Recorded>, u32), Wrong> {
        let (mut visits, mut most, mut end) = (Vec::new(), 0, 0_u32);
        let mut experts = Vec::new();
        let tokens = self.rows.chunk_by(|one, other| {
            (one.turn, one.phase, one.step, one.layer) == (other.turn, other.phase, other.step, other.layer)
        });
        for chosen in tokens {
            let Some(&Row { turn, phase, step, layer, .. }) = chosen.first() else { continue };
            experts.clear();
            experts.extend(chosen.iter().map(|row| (row.expert, row.line)));
            experts.sort_unstable();
            if let Some(twice) = experts.windows(2).find(|pair| pair[0].0 == pair[1].0) {
                return Err((Some(twice[1].1.into()), TraceProblem::Twice { layer, expert: twice[1].0 }));
            }
            let most_experts = self.experts_per_token.unwrap_or(CatalogShape::MAX_EXPERTS_PER_TOKEN);
            if let Some(row) = chosen.get(most_experts as usize) {
                let problem = TraceProblem::TooManyExperts { layer, experts_per_token: most_experts };
                return Err((Some(row.line.into()), problem));
            }
            // There are fewer rows than a u32 counts.
            end += chosen.len() as u32;
            most = most.max(chosen.len() as u32);
            visits.push(Recorded { turn, phase, step, layer, choices_end: end });
        }
        Ok((visits, most))
    }
}
