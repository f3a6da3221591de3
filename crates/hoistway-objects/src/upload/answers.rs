//! What answers to writes mean, and what is not known without one.

use crate::{
    Problem,
    checksum::Algorithm,
    pace::{Again, Fault},
    policy::Failure,
};

/// Whether a request that was sent went without an answer that can be used: what it asked for may have been done.
pub(super) fn is_unanswered(fault: &Fault) -> bool {
    match fault {
        Fault::Again(Again { failure, .. }) => {
            matches!(failure, Failure::Broken | Failure::NoHttp | Failure::Silent | Failure::Slow)
        }
        Fault::Final(problem) => {
            matches!(problem, Problem::Stopped | Problem::Tls(_) | Problem::WrongAnswer(_))
        }
    }
}

/// Whether a store may have done what it was asked for. One that says an error of its own may have done it all the same, and so
/// may one whose proxy says that it is not available.
pub(super) fn leaves_doubt(fault: &Fault) -> bool {
    let is_error = |failure: &Failure| matches!(failure, Failure::Refused | Failure::Unavailable(_));
    is_unanswered(fault) || matches!(fault, Fault::Again(Again { failure, .. }) if is_error(failure))
}

/// A problem after which either is possible.
pub(super) fn in_doubt(problem: Problem) -> Problem {
    match problem {
        Problem::StoredDamaged(_) | Problem::Doubtful(_) => problem,
        problem => Problem::Doubtful(of_a_save(problem).to_string()),
    }
}

/// A success with another checksum than that of what was sent.
pub(super) struct OtherSum {
    pub(super) algorithm: Algorithm,
    pub(super) said: u64,
    pub(super) sent: u64,
}

/// What another checksum means: a part is sent again, and a whole object is shown already.
pub(super) fn wrong_sum(other: OtherSum, is_shown: bool) -> Fault {
    let OtherSum { algorithm, said, sent } = other;
    let name = algorithm.name();
    let (said, sent) = (algorithm.text(said), algorithm.text(sent));
    if is_shown {
        return Problem::StoredDamaged(format!("its {name} is {said}, and that of what was sent {sent}"))
            .into();
    }
    let why = format!("the server said the {name} {said} of a part, and that of what was sent is {sent}");
    Fault::Again(Again::of(Failure::Refused, why))
}

/// Has bytes sent again that the server refuses because they changed on the way.
pub(super) fn refused_bytes(fault: Fault) -> Fault {
    match fault {
        Fault::Final(Problem::Refused { said, .. })
            if ["BadDigest", "XAmzContentChecksumMismatch", "InvalidDigest", "Crc64Mismatch"]
                .iter()
                .any(|code| said.ends_with(code)) =>
        {
            let why = format!("the server said {said}: the bytes that it got have another checksum");
            Fault::Again(Again::of(Failure::Refused, why))
        }
        fault => fault,
    }
}

/// Why Azure refuses blocks and their list, by its codes.
const REASONS: [(&str, &str); 3] = [
    (
        "InvalidBlobOrBlock",
        "another program may have left blocks there whose names have another length: the store drops them after a week, or as one \
         request writes a blob there",
    ),
    (
        "InvalidBlockList",
        "another save to this name may have ended meanwhile, and the store has dropped the blocks of this one: save it again, one at \
         a time",
    ),
    (
        "BlockCountExceedsLimit",
        "saves that failed may have left too many blocks there: the store drops them after a week, or as one request writes a blob \
         there",
    ),
];

/// A problem in the words of a save.
pub(super) fn of_a_save(problem: Problem) -> Problem {
    match problem {
        Problem::NotFound { said } => Problem::Refused { status: 404, said },
        Problem::Refused { status, said } => {
            let why = REASONS.iter().find(|(code, _)| said.ends_with(code)).map(|(_, why)| *why);
            Problem::Refused {
                status,
                said: why.map_or_else(|| said.clone(), |why| format!("{said}; {why}")),
            }
        }
        problem => problem,
    }
}
