//! Traces of routing: formats, errors, holes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use hoistway_experts::trace::{
    Format, HolePlace, Pattern, Phase, Synthetic, Trace, TraceError, TraceOptions, TraceProblem,
};
use proptest::{collection::vec, prelude::*};

const HEADER: &str = "# route_trace v1
# model=tiny.gguf arch=test n_layer=3 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=7
# layer=1 expert_bytes=100 dense_bytes=7
# layer=2 expert_bytes=300 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
";

fn read(text: &str) -> Result<Trace, TraceError> {
    Trace::read("t.csv", text.as_bytes(), &TraceOptions::default())
}

/// The rows of one token in the layers 0, 1 and 2.
fn token(phase: u32, step: u32) -> String {
    let row =
        |layer, slot| format!("0,{phase},{step},{layer},{slot},{},0.5,1,0\n", (step + layer + slot) % 8);
    (0..3).flat_map(|layer| (0..2).map(move |slot| row(layer, slot))).collect()
}

fn line_and_problem(text: &str) -> (Option<u64>, TraceProblem) {
    match read(text) {
        Err(TraceError::Invalid { name, line, problem }) => {
            assert_eq!(name, "t.csv");
            (line, problem)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_trace_of_routes_is_read_whatever_order_its_rows_have() {
    // As engines record: a prefill layer by layer, then the decode token by token.
    let prefill = "0,0,0,0,0,1,0.75,0,100\n0,0,0,0,1,3,0.25,0,100\n0,0,1,0,0,2,1,0,100\n0,0,1,0,1,0,1,0,0\n\
                   0,0,1,1,0,7,1,0,100\n0,0,1,1,1,6,1,0,100\n0,0,1,2,0,5,1,0,300\n0,0,1,2,1,4,1,0,300\n";
    let trace = read(&format!("{HEADER}{}{prefill}{}", token(1, 3), token(1, 2))).unwrap();
    assert_eq!(trace.model(), Some("tiny.gguf"));
    let shape = trace.shape();
    assert_eq!((shape.layers().len(), shape.experts(), shape.experts_per_token()), (3, 24, 2));
    assert_eq!(shape.token_cycle_bytes(), 2 * (100 + 100 + 300));
    let visits: Vec<_> = trace.visits().collect();
    let order: Vec<_> = visits.iter().map(|visit| (visit.phase, visit.step, visit.layer)).collect();
    let decode = [2, 3].into_iter().flat_map(|step| (0..3).map(move |layer| (Phase::Decode, step, layer)));
    let prefill = [(0, 0), (1, 0), (1, 1), (1, 2)].map(|(step, layer)| (Phase::Prefill, step, layer));
    assert_eq!(order, prefill.into_iter().chain(decode).collect::<Vec<_>>());
    assert_eq!(visits[0].experts, [(1, 0.75), (3, 0.25)]);
    assert!(trace.holes().is_empty());
    assert_eq!(trace.holes().prefill_visits, 2);
}

#[test]
fn holes_are_counted_and_the_first_is_named() {
    let steps: String = [4, 5, 8, 9].map(|step| token(1, step)).concat();
    let lines: Vec<&str> = steps.lines().collect();
    // Token 5 has no layer 1, and token 9 one expert in layer 2.
    let kept = lines.iter().filter(|line| !line.starts_with("0,1,5,1,") && !line.starts_with("0,1,9,2,1"));
    let text = format!("{HEADER}{}\n", kept.copied().collect::<Vec<_>>().join("\n"));
    let holes = *read(&text).unwrap().holes();
    assert_eq!((holes.tokens, holes.visits, holes.short_visits, holes.layers), (2, 1, 1, 0));
    assert_eq!(holes.first, Some(HolePlace { turn: 0, step: 5, layer: 1 }));
    assert!(!holes.is_empty());

    let one_layer = format!("{HEADER}0,1,0,2,0,1,0.5,0,0\n0,1,0,2,1,2,0.5,0,0\n");
    let trace = read(&one_layer).unwrap();
    assert_eq!(trace.holes().layers, 2);
    let experts: Vec<u32> = trace.shape().layers().iter().map(|layer| layer.experts).collect();
    assert_eq!(experts, [0, 0, 8]);
    assert_eq!(trace.shape().token_cycle_bytes(), 600);
}

#[test]
fn errors_name_the_line_and_what_is_wrong_with_it() {
    let with = |row: &str| format!("{HEADER}{}{row}\n", token(1, 0));
    let line = Some(6 + 6 + 1);
    let field = |field, value: &str, expected| TraceProblem::Field { field, value: value.into(), expected };
    let number = "a whole number in its range";
    for (row, problem) in [
        ("0,1,1,3,0,1,0.5,0,0", TraceProblem::NoLayer { layer: 3, layers: 3 }),
        ("0,1,1,0,0,8,0.5,0,0", TraceProblem::NoExpert { layer: 0, expert: 8, experts: 8 }),
        (
            "0,1,1,0,0,4294967295,0.5,0,0",
            TraceProblem::NoExpert { layer: 0, expert: u32::MAX, experts: 1 << 20 },
        ),
        ("0,1,1,4294967295,0,1,0.5,0,0", TraceProblem::NoLayer { layer: u32::MAX, layers: 4096 }),
        ("0,1,0,1,0,1,0.5,0,0", TraceProblem::Twice { layer: 1, expert: 1 }),
        ("0,1,0,1,0,5,0.5,0,0", TraceProblem::TooManyExperts { layer: 1, experts_per_token: 2 }),
        ("0,1,1,0,0,-1,0.5,0,0", field("expert", "-1", number)),
        ("0,1,4294967296,0,0,1,0.5,0,0", field("step", "4294967296", number)),
        ("0,2,1,0,0,1,0.5,0,0", field("phase", "2", "0 (prefill) or 1 (decode)")),
        ("0,1,1,0,0,1,NaN,0,0", field("weight", "NaN", "a finite number")),
        ("0,1,1,0,0,1,0.5,0", TraceProblem::Fields { found: 8, columns: 9 }),
        ("0,1,1,0,0,1,0.5,0,0,0", TraceProblem::Fields { found: 10, columns: 9 }),
        ("# n_expert=many", field("n_expert", "many", number)),
        ("# route_trace v2", TraceProblem::Version { found: "v2".into() }),
        (&"x".repeat((1 << 20) + 1), TraceProblem::LongLine { limit_bytes: 1 << 20 }),
    ] {
        assert_eq!(line_and_problem(&with(row)), (line, problem), "{}", &row[..row.len().min(40)]);
    }
    let said = read(&with("0,1,1,0,0,8,0.5,0,0")).unwrap_err().to_string();
    assert_eq!(said, "t.csv, line 13: there is no expert 8 in layer 0: it has 8");

    assert_eq!(
        line_and_problem("turn,phase,step,layer,slot\n"),
        (Some(1), TraceProblem::NoColumn { column: "expert" })
    );
    for empty in ["", "\n\n", HEADER, "# only a comment\n"] {
        assert_eq!(line_and_problem(empty), (None, TraceProblem::Empty));
    }
    let bytes = [HEADER.as_bytes(), b"0,1,0,0,0,\xff,1,0,0\n"].concat();
    let not_text = Trace::read("t", &bytes[..], &TraceOptions::default()).unwrap_err();
    assert!(matches!(not_text, TraceError::Invalid { line: Some(7), problem: TraceProblem::NotText, .. }));
}

#[test]
fn sizes_come_from_the_trace_else_from_the_caller() {
    let rows = "step,layer,expert\n0,0,1\n0,0,2\n0,4,0\n";
    assert_eq!(line_and_problem(rows), (None, TraceProblem::NoExpertBytes { layer: 0 }));
    let options = TraceOptions { expert_bytes: Some(50) };
    let trace = Trace::read("t", rows.as_bytes(), &options).unwrap();
    let layers: Vec<_> =
        trace.shape().layers().iter().map(|layer| (layer.experts, layer.expert_bytes)).collect();
    assert_eq!(layers, [(3, 50), (0, 0), (0, 0), (0, 0), (1, 50)]);
    assert_eq!(trace.visits().next().unwrap().experts, [(1, 1.0), (2, 1.0)]);
    assert_eq!(trace.shape().experts_per_token(), 2);
    // A miss says how large the expert is, a hit says 0.
    let rows = "step,layer,expert,expert_bytes\n0,0,1,70\n1,0,1,0\n";
    let trace = Trace::read("t", rows.as_bytes(), &options).unwrap();
    assert_eq!(trace.shape().layers()[0].expert_bytes, 70);
}

#[test]
fn json_lines_are_read_and_their_errors_name_the_line() {
    let header =
        r#"{"hoistway_trace":1,"experts_per_token":2,"layers":[{"layer":1,"experts":4,"expert_bytes":9}]}"#;
    let visit = r#"{"step":0,"layer":1,"experts":[3,0]}"#;
    let trace = read(&format!("\n{header}\n{visit}\n")).unwrap();
    let visits: Vec<_> =
        trace.visits().map(|visit| (visit.phase, visit.layer, visit.experts.to_vec())).collect();
    assert_eq!(visits, [(Phase::Decode, 1, vec![(3, 1.0), (0, 1.0)])]);

    let problem = |line: &str| match line_and_problem(&format!("{header}\n{visit}\n{line}\n")) {
        (Some(3), problem) => problem.to_string(),
        other => panic!("{other:?}"),
    };
    for (line, said) in [
        (r#"{"step":1,"layer":1,"experts":[4]}"#, "no expert 4 in layer 1: it has 4"),
        (r#"{"step":1,"layer":0,"experts":[0]}"#, "no expert 0 in layer 0: it has 0"),
        (r#"{"step":1,"layer":2,"experts":[0]}"#, "no layer 2: the model has 2"),
        (r#"{"step":1,"layer":1,"experts":[0],"weights":[1,2]}"#, "1 experts and 2 weights"),
        (r#"{"step":1,"layer":1,"experts":[0],"weights":[1e39]}"#, "finite"),
        (r#"{"step":1,"layer":1,"experts":[0],"wieghts":[1]}"#, "unknown field `wieghts`"),
        (r#"{"step":1,"layer":1"#, "EOF"),
        ("[1,\"decode\",0,1,[0],null]", "does not begin with"),
        (r#"{"step":-1,"layer":1,"experts":[0]}"#, "invalid value"),
    ] {
        assert!(problem(line).contains(said), "{line}: {}", problem(line));
    }
    let former = header.replace("hoistway_trace", "windlass_trace");
    assert!(read(&format!("{former}\n{visit}\n")).is_ok());
    let newer = header.replace(":1,", ":2,");
    assert_eq!(line_and_problem(&newer), (Some(1), TraceProblem::Version { found: "2".into() }));
    let lying = header.replace(r#""experts":4"#, r#""experts":4294967295"#);
    let text = read(&format!("{lying}\n{visit}\n")).unwrap_err().to_string();
    assert!(text.contains("more than 1048576 experts"), "{text}");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = Trace::open("/nonexistent/trace.csv".as_ref(), &TraceOptions::default()).unwrap_err();
    assert!(matches!(&error, TraceError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound));
    assert!(error.to_string().contains("/nonexistent/trace.csv"), "{error}");
}

fn synthetic() -> impl Strategy<Value = Synthetic> {
    let pattern = prop_oneof![
        Just(Pattern::Uniform),
        Just(Pattern::Scan),
        (0.0..2.0).prop_map(|exponent| Pattern::Zipf { exponent }),
        (0.0..1.0, 0.0..2.0).prop_map(|(stay, exponent)| Pattern::Sticky { stay, exponent }),
    ];
    (pattern, 1..5_u32, 4..20_u32, 1..5_u32, 1..1000_u64, 0..5_u32, 1..6_u32, any::<u64>()).prop_map(
        |(pattern, layers, experts, experts_per_token, expert_bytes, prefill_tokens, tokens, seed)| {
            Synthetic {
                pattern,
                layers,
                experts,
                experts_per_token,
                expert_bytes,
                prefill_tokens,
                tokens,
                seed,
            }
        },
    )
}

proptest! {
    #[test]
    fn what_is_written_is_read_again(synthetic in synthetic()) {
        let trace = synthetic.generate().unwrap();
        for format in Format::ALL {
            let mut text = Vec::new();
            trace.write(*format, &mut text).unwrap();
            let again = Trace::read("t", &text[..], &TraceOptions::default()).unwrap();
            prop_assert_eq!(&again, &trace);
        }
    }

    #[test]
    fn a_trace_that_is_cut_short_is_an_error_or_a_shorter_trace(synthetic in synthetic(), cut in 0.0..1.0) {
        let trace = synthetic.generate().unwrap();
        for format in Format::ALL {
            let mut text = Vec::new();
            trace.write(*format, &mut text).unwrap();
            text.truncate((text.len() as f64 * cut) as usize);
            if let Ok(again) = Trace::read("t", &text[..], &TraceOptions::default()) {
                prop_assert!(again.visits().count() <= trace.visits().count());
                let is_known = again.visits().all(|visit| {
                    let experts = again.shape().layers()[visit.layer as usize].experts;
                    visit.experts.iter().all(|&(expert, weight)| expert < experts && weight.is_finite())
                });
                prop_assert!(is_known);
            }
        }
    }

    #[test]
    fn any_bytes_are_a_trace_or_an_error(bytes in vec(any::<u8>(), 0..400), is_json in any::<bool>()) {
        let start: &[u8] = if is_json { b"{\"hoistway_trace\":1," } else { b"step,layer,expert\n" };
        let _ = Trace::read("t", &[start, &bytes].concat()[..], &TraceOptions { expert_bytes: Some(1) });
        let _ = Trace::read("t", &bytes[..], &TraceOptions { expert_bytes: Some(1) });
    }
}
