//! Names of sources.
#![forbid(unsafe_code)]

use crate::{Error, Result};
use std::{
    fmt,
    path::{Path, PathBuf},
};

/// The name of a source: the path of a file of this machine, or by a URL.
///
/// ```
/// use std::path::Path;
/// use hoistway::catalog::SourceName;
/// let name = SourceName::from(Path::new("models/a.gguf"));
/// assert!(matches!(&name, SourceName::Path(path) if path.ends_with("a.gguf")));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceName {
    /// A path of this machine.
    Path(PathBuf),
    /// A URL, such as `scheme://host/name`.
    Url(String),
}

impl SourceName {
    /// Returns the path, or the text of the URL: what errors carry, and what opens the source again.
    pub fn as_path(&self) -> &Path {
        match self {
            Self::Path(path) => path,
            Self::Url(url) => Path::new(url),
        }
    }

    /// What logs and timelines show: of a URL neither user, password, query nor fragment, any of which may be a secret.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Path(path) => self.mistyped_url().unwrap_or_else(|| path.display().to_string()),
            Self::Url(url) => shown(url),
        }
    }

    /// The URL, as [`SourceName::shown`] has it, that a path stands for which has one slash after a scheme, as objects for paths
    /// make it; on Windows, these turn all slashes.
    fn mistyped_url(&self) -> Option<String> {
        let Self::Path(path) = self else { return None };
        let (scheme, rest) = path.to_str()?.split_once(':')?;
        let rest = rest.strip_prefix(['/', '\\'])?;
        SCHEMES.contains(&scheme).then(|| shown(&format!("{scheme}://{}", rest.replace('\\', "/"))))
    }

    /// Fails for a path that is meant as a URL, unless there is such a file.
    pub(crate) fn check_meant(&self) -> Result<()> {
        match self.mistyped_url().filter(|_| !self.as_path().exists()) {
            None => Ok(()),
            Some(url) => {
                let reason =
                    "a URL has '//' after its scheme; give it as text: objects for paths leave one out";
                Err(Error::invalid_option("path", url, reason))
            }
        }
    }

    /// Whether it is the URL of a web server with a query. Such a URL, which may be signed, names one file: no index of
    /// others, and no folder.
    pub(crate) fn has_query(&self) -> bool {
        match self {
            Self::Path(_) => false,
            Self::Url(url) => matches!(scheme_of(url), Some("http" | "https")) && url.contains('?'),
        }
    }

    /// The name of `file` in the same folder.
    ///
    /// ```
    /// use std::path::Path;
    /// use hoistway::catalog::SourceName;
    /// let model = SourceName::from(Path::new("s3://models/llama/model.safetensors"));
    /// assert_eq!(model.beside("config.json"), Path::new("s3://models/llama/config.json"));
    /// ```
    pub fn beside(&self, file: &str) -> PathBuf {
        match self {
            Self::Path(path) => path.with_file_name(file),
            Self::Url(url) => {
                let folder = url.rfind('/').map_or("", |slash| &url[..=slash]);
                format!("{folder}{file}").into()
            }
        }
    }
}

/// A text that begins with a scheme and `://` is a URL.
impl From<&Path> for SourceName {
    fn from(name: &Path) -> Self {
        let url = name.to_str().filter(|text| scheme_of(text).is_some());
        url.map_or_else(|| Self::Path(name.to_owned()), |url| Self::Url(url.to_owned()))
    }
}

impl fmt::Display for SourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_path().display().fmt(f)
    }
}

/// The schemes of URLs that stores have.
const SCHEMES: [&str; 8] = ["https", "http", "s3", "gs", "az", "abfs", "abfss", "hf"];

/// The scheme of a URL. One letter is a drive of Windows.
pub(super) fn scheme_of(text: &str) -> Option<&str> {
    let (scheme, _) = text.split_once("://")?;
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    let begins_well = scheme.starts_with(|first: char| first.is_ascii_alphabetic());
    (scheme.len() > 1 && begins_well && scheme.bytes().all(is_allowed)).then_some(scheme)
}

#[cfg(feature = "objects")]
use hoistway_objects::shown;

#[cfg(not(feature = "objects"))]
fn shown(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    let rest = &rest[..rest.find(['?', '#']).unwrap_or(rest.len())];
    format!("{scheme}://{}", &rest[rest.rfind('@').map_or(0, |end| end + 1)..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_has_no_secret() {
        for (name, shown) in [
            ("https://me:secret@host/a.gguf?X-Amz-Signature=5#b", "https://host/a.gguf"),
            ("s3://bucket/a.gguf", "s3://bucket/a.gguf"),
            ("models/what?.gguf", "models/what?.gguf"),
        ] {
            assert_eq!(SourceName::from(Path::new(name)).shown(), shown);
        }
    }

    #[test]
    fn a_path_with_a_scheme_is_a_url_that_lacks_a_slash() {
        for (text, expected) in [
            ("https:/host/a.gguf?sig=canary", Some("https://host/a.gguf")),
            ("s3:/bucket/a.gguf", Some("s3://bucket/a.gguf")),
            (r"https:\me:canary@host\a.gguf?sig=canary", Some("https://host/a.gguf")),
            ("s3://bucket/a.gguf", None),
            ("models:/a.gguf", None),
            ("/models/https:/a.gguf", None),
        ] {
            assert_eq!(SourceName::from(Path::new(text)).mistyped_url().as_deref(), expected);
        }
    }

    #[test]
    fn what_has_a_scheme_is_a_url() {
        for (text, scheme) in [
            ("s3://bucket/a.gguf", Some("s3")),
            ("git+http://host", Some("git+http")),
            ("/models/a.gguf", None),
            ("models/a://b", None),
            ("C://a", None),
            ("://a", None),
            ("3s://a", None),
        ] {
            assert_eq!(scheme_of(text), scheme, "{text}");
            assert_eq!(matches!(SourceName::from(Path::new(text)), SourceName::Url(_)), scheme.is_some());
        }
    }

    #[test]
    fn a_query_is_one_of_a_web_server() {
        for (text, expected) in [
            ("https://host/a?list=/", true),
            ("http://host/a?b=.json", true),
            ("https://host/a/", false),
            ("s3://bucket/what?/", false),
            ("models/a?", false),
        ] {
            assert_eq!(SourceName::from(Path::new(text)).has_query(), expected, "{text}");
        }
    }

    #[test]
    fn neighbours_lie_in_the_same_folder() {
        for (name, expected) in [
            ("models/a.gguf", "models/b.gguf"),
            ("a.gguf", "b.gguf"),
            ("toy:///models/a.gguf", "toy:///models/b.gguf"),
            ("s3://bucket/a.gguf", "s3://bucket/b.gguf"),
        ] {
            let beside = SourceName::from(Path::new(name)).beside("b.gguf");
            assert_eq!(beside, Path::new(expected));
        }
    }
}
