//! Policies by name. A policy is added here, and by a file.
#![forbid(unsafe_code)]

use super::{
    CatalogShape, Future, Policy, Profile, arc::AdaptiveCache, belady::Belady, ewma2::Ewma2, lfu::Lfu,
    lru::Lru, slru::Slru, static_profile::StaticProfile,
};

/// The policy of stores that name none.
pub const DEFAULT: &str = Ewma2::NAME;

/// The policy that needs a profile.
pub const STATIC_PROFILE: &str = StaticProfile::NAME;

const MEMBERS: &[Member] = &[
    Member {
        name: Ewma2::NAME,
        about: "evicts what the router chose least, lately and over the text",
        make: |input| Ok(Box::new(Ewma2::new(input.shape))),
    },
    Member {
        name: Lru::NAME,
        about: "evicts what was not used for the longest time",
        make: |input| Ok(Box::new(Lru::new(input.shape))),
    },
    Member {
        name: Slru::NAME,
        about: "evicts what was used once before what was used again",
        make: |input| Ok(Box::new(Slru::new(input.shape))),
    },
    Member {
        name: Lfu::NAME,
        about: "evicts what the fewest visits chose, since the beginning",
        make: |input| Ok(Box::new(Lfu::new(input.shape))),
    },
    Member {
        name: AdaptiveCache::NAME,
        about: "shares the room between what was used once and again, as misses teach it",
        make: |input| Ok(Box::new(AdaptiveCache::new(input.shape))),
    },
    Member {
        name: StaticProfile::NAME,
        about: "keeps what a recorded profile says is chosen most",
        make: |input| match input.profile {
            Some(profile) => Ok(Box::new(StaticProfile::new(input.shape, profile))),
            None => Err(PolicyError::NeedsProfile),
        },
    },
    Member {
        name: Belady::NAME,
        about: "evicts what is used again last; knows the future, so only replays have it",
        make: |input| match input.future {
            Some(future) => Ok(Box::new(Belady::new(input.shape, future))),
            None => Err(PolicyError::NeedsFuture),
        },
    },
];

struct Member {
    name: &'static str,
    about: &'static str,
    make: fn(&PolicyInput<'_>) -> Result<Box<dyn Policy>, PolicyError>,
}

/// The inputs of policies. Most need a shape alone; some also a profile or the future.
#[derive(Clone, Copy, Debug)]
pub struct PolicyInput<'a> {
    /// The model.
    pub shape: &'a CatalogShape,
    /// The profile of `static-profile`.
    pub profile: Option<&'a Profile>,
    /// The future visits, for `belady`.
    pub future: Option<&'a Future>,
}

impl<'a> From<&'a CatalogShape> for PolicyInput<'a> {
    fn from(shape: &'a CatalogShape) -> Self {
        Self { shape, profile: None, future: None }
    }
}

/// Why there is no policy of a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// No policy has this name.
    #[error("there is no policy '{name}': it must be one of {}", names().collect::<Vec<_>>().join(", "))]
    Unknown {
        /// The name that was given.
        name: String,
    },
    /// `static-profile` was named without a profile.
    #[error("policy {} needs a profile: give a recorded trace for it", StaticProfile::NAME)]
    NeedsProfile,
    /// `belady` was named where the future is not known.
    #[error("policy {} knows the future, so only a replay can have it: use {}", Belady::NAME, DEFAULT)]
    NeedsFuture,
}

/// Returns the policy of a name, without residents.
///
/// ```
/// use hoistway_experts::policy::{self, CatalogShape, ExpertId, LayerShape};
/// let shape = CatalogShape::new(1, vec![LayerShape { experts: 2, expert_bytes: 1 }]).unwrap();
/// let mut policy = policy::by_name("lru", &shape).unwrap();
/// for expert in [0, 1] {
///     policy.visit(0, &[(expert, 1.0)]);
///     policy.insert(ExpertId { layer: 0, expert });
/// }
/// assert_eq!(policy.victim(&mut |_| true), Some(ExpertId { layer: 0, expert: 0 }));
/// ```
///
/// # Errors
/// [`PolicyError`] if no policy has the name, or it needs what the input lacks.
pub fn by_name<'a>(name: &str, input: impl Into<PolicyInput<'a>>) -> Result<Box<dyn Policy>, PolicyError> {
    let member = MEMBERS.iter().find(|member| member.name == name);
    let member = member.ok_or_else(|| PolicyError::Unknown { name: name.to_owned() })?;
    (member.make)(&input.into())
}

/// Returns the names of all policies, the default first.
pub fn names() -> impl Iterator<Item = &'static str> {
    MEMBERS.iter().map(|member| member.name)
}

/// Returns what a policy does in a few words, if there is one of this name.
pub fn about(name: &str) -> Option<&'static str> {
    MEMBERS.iter().find(|member| member.name == name).map(|member| member.about)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::LayerShape;

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_names() {
        let shape = CatalogShape::new(1, vec![LayerShape { experts: 1, expert_bytes: 1 }]).unwrap();
        let text = by_name("lur", &shape).err().unwrap().to_string();
        assert!(text.contains("'lur'") && names().all(|name| text.contains(name)), "{text}");
        assert_eq!(by_name(StaticProfile::NAME, &shape).err(), Some(PolicyError::NeedsProfile));
        assert_eq!(by_name(Belady::NAME, &shape).err(), Some(PolicyError::NeedsFuture));
        assert_eq!(names().next(), Some(DEFAULT));
        assert_eq!(by_name(DEFAULT, &shape).unwrap().name(), DEFAULT);
    }
}
