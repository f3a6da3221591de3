//! `*.safetensors.index.json`: which file holds which tensor of a sharded checkpoint.
#![forbid(unsafe_code)]

use super::SourceName;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    path::{Component, Path},
};

/// Longest index that is read: as long as the longest header.
pub const MAX_INDEX_BYTES: u64 = super::safetensors::MAX_HEADER_BYTES;

/// The `weight_map` of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    /// Name of the tensor → name of its file, relative to the index.
    pub weight_map: HashMap<String, String>,
}

/// Why an index cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// Larger than any real index.
    #[error("the index has {len} bytes; at most {MAX_INDEX_BYTES} are read")]
    TooLarge {
        /// Length of the file in bytes.
        len: u64,
    },
    /// Not JSON, or cut off.
    #[error("the index is not complete JSON ({0}); copy or download it again")]
    Json(#[source] serde_json::Error),
    /// JSON of another form.
    #[error(
        "the index is not of the form {{\"weight_map\": {{tensor: file, ...}}}} ({0}); copy or download it again, or name the \
         files to load"
    )]
    Form(#[source] serde_json::Error),
    /// A file outside the index's folder, which a downloaded index has no business to name.
    #[error("tensor '{tensor}' is mapped to '{file}', which is not a file under the index's own folder")]
    UnsafePath {
        /// The tensor.
        tensor: String,
        /// The path that the index gives.
        file: String,
    },
    /// The map has no entry.
    #[error("the index maps no tensor")]
    Empty,
    /// The named file does not hold the tensor.
    #[error("tensor '{tensor}' should be in '{file}', but that file does not have it")]
    MissingTensor {
        /// The tensor.
        tensor: String,
        /// The file that the index gives.
        file: String,
    },
}

impl From<serde_json::Error> for IndexError {
    fn from(error: serde_json::Error) -> Self {
        if error.is_data() { Self::Form(error) } else { Self::Json(error) }
    }
}

impl Index {
    /// Parses the text of an index.
    ///
    /// ```
    /// use hoistway::catalog::index::Index;
    /// let index = Index::parse(br#"{"weight_map": {"a": "model-00001-of-00002.safetensors"}}"#)?;
    /// assert_eq!(index.files(), ["model-00001-of-00002.safetensors"]);
    /// # Ok::<(), hoistway::catalog::index::IndexError>(())
    /// ```
    ///
    /// # Errors
    /// Any [`IndexError`] but `MissingTensor`, which needs the files.
    pub fn parse(text: &[u8]) -> Result<Self, IndexError> {
        let RawIndex { weight_map: WeightMap(weight_map) } = serde_json::from_slice(text)?;
        if weight_map.is_empty() {
            return Err(IndexError::Empty);
        }
        let plain = |(tensor, file): (String, String)| match plain_name(&file) {
            Some(name) => Ok((tensor, name)),
            None => Err(IndexError::UnsafePath { tensor, file }),
        };
        Ok(Self { weight_map: weight_map.into_iter().map(plain).collect::<Result<_, _>>()? })
    }

    /// Fails if a name means something else in a URL than in a path, and may so lead out of the folder.
    pub(super) fn check_names(&self, index: &SourceName) -> Result<(), IndexError> {
        let is_url = matches!(index, SourceName::Url(_));
        match self.weight_map.iter().find(|(_, file)| is_url && file.contains(['?', '#', '%', '\\'])) {
            Some((tensor, file)) => {
                Err(IndexError::UnsafePath { tensor: tensor.clone(), file: file.clone() })
            }
            None => Ok(()),
        }
    }

    /// The files that the index names, each once, in name order.
    pub fn files(&self) -> Vec<&str> {
        let files: BTreeSet<&str> = self.weight_map.values().map(String::as_str).collect();
        files.into_iter().collect()
    }
}

/// The name of a file below the folder of its index without what means nothing, such as `./`; `None` if it is no such file.
fn plain_name(file: &str) -> Option<String> {
    let path = Path::new(file);
    if file.contains('\0') || matches!(SourceName::from(path), SourceName::Url(_)) {
        return None;
    }
    let mut parts = Vec::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => parts.push(part.to_str()?),
            Component::CurDir => {}
            _ => return None,
        }
    }
    (!parts.is_empty()).then(|| parts.join("/"))
}

#[derive(serde::Deserialize)]
#[serde(expecting = "an object with \"weight_map\"")]
struct RawIndex {
    weight_map: WeightMap,
}

/// A map in which no name may come twice.
struct WeightMap(HashMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WeightMapVisitor;
        impl<'de> Visitor<'de> for WeightMapVisitor {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object that gives each tensor's file")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut weight_map = HashMap::new();
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    if weight_map.contains_key(&tensor) {
                        return Err(de::Error::custom(format_args!("tensor '{tensor}' is given twice")));
                    }
                    weight_map.insert(tensor, file);
                }
                Ok(WeightMap(weight_map))
            }
        }
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_leave_the_folder_are_refused() {
        for file in [
            "../model.safetensors",
            "/etc/passwd",
            "a/../../b",
            "sub/../model.safetensors",
            "",
            ".",
            "./",
            "./..",
            "a\0b",
            "s3://bucket/a.safetensors",
        ] {
            let text = serde_json::json!({"weight_map": {"a": file}}).to_string();
            assert!(
                matches!(Index::parse(text.as_bytes()), Err(IndexError::UnsafePath { .. })),
                "{file:?} was taken"
            );
        }
        for (file, name) in [
            ("sub/model.safetensors", "sub/model.safetensors"),
            ("./model.safetensors", "model.safetensors"),
            ("./sub/.//model.safetensors", "sub/model.safetensors"),
            (".hidden", ".hidden"),
        ] {
            let text = serde_json::json!({"weight_map": {"a": file}}).to_string();
            assert_eq!(Index::parse(text.as_bytes()).unwrap().files(), [name], "{file}");
        }
    }

    #[test]
    fn a_tensor_given_twice_is_refused() {
        let text = br#"{"metadata": {"total_size": 3}, "weight_map": {"a": "x", "a": "y"}}"#;
        assert!(matches!(Index::parse(text), Err(IndexError::Form(_))));
    }

    #[test]
    fn what_is_no_index_is_told_in_the_words_of_the_format() {
        for text in ["null", "[]", "5", "{}", r#"{"weight_map": null}"#, r#"{"weight_map": {"a": 5}}"#] {
            let error = Index::parse(text.as_bytes()).unwrap_err();
            assert!(matches!(error, IndexError::Form(_)), "{text}: {error:?}");
            let told = error.to_string();
            assert!(told.contains("weight_map") && told.contains("download it again"), "{text}: {told}");
            assert!(!told.contains("RawIndex"), "{text}: {told}");
        }
        for text in ["", "{", r#"{"weight_map""#, "nul"] {
            let error = Index::parse(text.as_bytes()).unwrap_err();
            assert!(matches!(error, IndexError::Json(_)), "{text}: {error:?}");
        }
    }
}
