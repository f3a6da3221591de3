//! Tells tensors of experts from others by their names, as converters and model authors write them.
#![forbid(unsafe_code)]

use super::Role;

/// The parts of a tensor's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name<'a> {
    pub(super) layer: u64,
    /// The expert, or `None` if the tensor stacks all experts of the layer.
    pub(super) expert: Option<u64>,
    pub(super) role: Role,
    /// The component of the role.
    pub(super) component: &'a str,
}

impl<'a> Name<'a> {
    /// The name of a tensor of experts in a GGUF file, as llama.cpp's converter writes it.
    pub(super) fn of_gguf(name: &'a str) -> Option<Self> {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (tensor, rest) = rest.strip_prefix("ffn_")?.split_once('.')?;
        let layer = number(layer)?;
        if let Some(role) = tensor.strip_suffix("_exps") {
            return Some(Self { layer, expert: None, role: gguf_role(role)?, component: rest });
        }
        // Mixtral was converted to a tensor for each expert at first.
        let (expert, component) = rest.split_once('.')?;
        Some(Self { layer, expert: Some(number(expert)?), role: gguf_role(tensor)?, component })
    }

    /// The name of a tensor of experts in a safetensors file, as transformers writes it.
    pub(super) fn of_safetensors(name: &'a str) -> Option<Self> {
        let (before, after) = split_experts(name)?;
        let layer = last_layer(before)?;
        let (first, rest) = after.split_once('.').unwrap_or((after, ""));
        if let Some(expert) = number(first) {
            let (role, component) = rest.split_once('.')?;
            return Some(Self { layer, expert: Some(expert), role: projection(role)?, component });
        }
        // `gate_up_proj`, `gate_up_proj.weight`, `gate_up_proj_blocks`.
        if let Some(role) = projection(first) {
            let component = if rest.is_empty() { "weight" } else { rest };
            return Some(Self { layer, expert: None, role, component });
        }
        let (role, component) = first.rsplit_once('_')?;
        let role = projection(role)?;
        rest.is_empty().then_some(Self { layer, expert: None, role, component })
    }
}

/// Whether a component is streamed with its expert. Others stay resident if they are small.
pub(super) fn is_payload(component: &str) -> bool {
    matches!(component, "weight" | "blocks" | "scales" | "qweight" | "weight_packed")
}

/// Whether a component stays resident, however large it is.
pub(super) fn stays_resident(component: &str) -> bool {
    component.ends_with("bias") || component.starts_with("input_")
}

fn gguf_role(name: &str) -> Option<Role> {
    Some(match name {
        "gate" => Role::Gate,
        "up" => Role::Up,
        "down" => Role::Down,
        "gate_up" => Role::GateUp,
        _ => return None,
    })
}

fn projection(name: &str) -> Option<Role> {
    Some(match name {
        "gate_proj" | "w1" => Role::Gate,
        "up_proj" | "w3" => Role::Up,
        "down_proj" | "w2" => Role::Down,
        "gate_up_proj" => Role::GateUp,
        _ => return None,
    })
}

/// Splits a name at the segment `experts`. `shared_experts` is another segment.
fn split_experts(name: &str) -> Option<(&str, &str)> {
    const SEGMENT: &str = ".experts.";
    let start = name.find(SEGMENT)?;
    Some((&name[..start], &name[start + SEGMENT.len()..]))
}

/// The number behind the last segment that counts layers.
fn last_layer(before: &str) -> Option<u64> {
    let mut segments = before.rsplit('.').peekable();
    while let Some(segment) = segments.next() {
        if let Some(layer) = number(segment)
            && segments.peek().is_some_and(|name| matches!(*name, "layers" | "layer" | "blocks" | "h"))
        {
            return Some(layer);
        }
    }
    None
}

/// A number without sign and leading zeros.
fn number(text: &str) -> Option<u64> {
    let is_canonical = text == "0" || !text.starts_with('0');
    (is_canonical && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: Option<Name<'_>>) -> Option<(u64, Option<u64>, Role, &str)> {
        name.map(|name| (name.layer, name.expert, name.role, name.component))
    }

    #[test]
    fn names_of_gguf_are_told_apart() {
        let gguf = |name| found(Name::of_gguf(name));
        assert_eq!(gguf("blk.3.ffn_gate_exps.weight"), Some((3, None, Role::Gate, "weight")));
        assert_eq!(gguf("blk.0.ffn_gate_up_exps.weight"), Some((0, None, Role::GateUp, "weight")));
        assert_eq!(gguf("blk.11.ffn_down_exps.bias"), Some((11, None, Role::Down, "bias")));
        assert_eq!(gguf("blk.1.ffn_up_exps.input_scale"), Some((1, None, Role::Up, "input_scale")));
        assert_eq!(gguf("blk.1.ffn_up.7.weight"), Some((1, Some(7), Role::Up, "weight")));
        for other in [
            "blk.1.ffn_up_shexp.weight",
            "blk.1.ffn_gate_inp.weight",
            "blk.1.ffn_up.weight",
            "blk.x.ffn_up_exps.weight",
            "blk.01.ffn_up_exps.weight",
            "blk.1.attn_q.weight",
            "output.weight",
        ] {
            assert_eq!(gguf(other), None, "{other}");
        }
    }

    #[test]
    fn names_of_safetensors_are_told_apart() {
        let names = |name| found(Name::of_safetensors(name));
        assert_eq!(
            names("model.layers.5.mlp.experts.12.down_proj.weight_scale_inv"),
            Some((5, Some(12), Role::Down, "weight_scale_inv"))
        );
        assert_eq!(
            names("model.layers.0.block_sparse_moe.experts.7.w3.weight"),
            Some((0, Some(7), Role::Up, "weight"))
        );
        assert_eq!(
            names("model.layers.2.mlp.experts.gate_up_proj_blocks"),
            Some((2, None, Role::GateUp, "blocks"))
        );
        assert_eq!(
            names("model.layers.2.mlp.experts.gate_up_proj_bias"),
            Some((2, None, Role::GateUp, "bias"))
        );
        assert_eq!(
            names("language_model.model.layers.9.feed_forward.experts.down_proj"),
            Some((9, None, Role::Down, "weight"))
        );
        for other in [
            "model.layers.5.mlp.shared_experts.gate_proj.weight",
            "model.layers.5.mlp.gate.weight",
            "model.experts.1.up_proj.weight",
            "model.layers.5.mlp.experts.1.norm.weight",
            "model.layers.5.mlp.experts.router_blocks",
        ] {
            assert_eq!(names(other), None, "{other}");
        }
    }
}
