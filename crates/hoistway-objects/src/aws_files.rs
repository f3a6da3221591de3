//! What the shared files of AWS's tools say of a profile besides its keys: region, endpoint, and who gives credentials.
//! <https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html>

use crate::file_state::FileState;
use std::{collections::HashMap, path::PathBuf};

/// Settings of one profile.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Profile {
    pub(crate) region: Option<String>,
    pub(crate) endpoint: Option<String>,
    /// The program that prints credentials, and its arguments.
    pub(crate) process: Option<String>,
    pub(crate) role: Option<Role>,
}

/// A role that a profile takes on.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Role {
    pub(crate) arn: String,
    /// The profile that may take it on, or what else may.
    pub(crate) source_profile: Option<String>,
    pub(crate) credential_source: Option<String>,
    pub(crate) web_identity_token_file: Option<String>,
    pub(crate) session_name: Option<String>,
    pub(crate) external_id: Option<String>,
    pub(crate) mfa_serial: Option<String>,
}

/// Settings of sections. Those of a nested section are named `outer.inner`.
type Sections = HashMap<String, HashMap<String, String>>;

/// The state of the shared files, which is another one once they were written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FilesState([Option<FileState>; 2]);

impl FilesState {
    /// That of the files that the environment names.
    pub(crate) fn now(variable: impl Fn(&str) -> Option<String>) -> Self {
        Self(paths(variable).map(|path| path.map(FileState::of)))
    }
}

/// The files that the environment names: the one with settings, and the one with keys.
fn paths(variable: impl Fn(&str) -> Option<String>) -> [Option<PathBuf>; 2] {
    let home = || variable("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    let files = [("AWS_CONFIG_FILE", ".aws/config"), ("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials")];
    files.map(|(name, default)| match variable(name).filter(|path| !path.is_empty()) {
        Some(path) => match path.strip_prefix("~/") {
            Some(below) => Some(home()?.join(below)),
            None => Some(path.into()),
        },
        None => Some(home()?.join(default)),
    })
}

impl Profile {
    /// The settings of a profile in the files that the environment names.
    pub(crate) fn find(profile: &str, variable: impl Fn(&str) -> Option<String>) -> Self {
        let [config, credentials] = paths(variable).map(|path| {
            let text = path.and_then(|path| std::fs::read(path).ok()).unwrap_or_default();
            sections(&String::from_utf8_lossy(&text))
        });
        Self::of(profile, &config, &credentials)
    }

    fn of(profile: &str, config: &Sections, credentials: &Sections) -> Self {
        let in_config = config
            .get(&format!("profile {profile}"))
            .or_else(|| config.get("default").filter(|_| profile == "default"));
        let get = |name: &str| {
            let found = [in_config, credentials.get(profile)];
            found.into_iter().flatten().find_map(|own| own.get(name)).filter(|text| !text.is_empty()).cloned()
        };
        let of_s3 = || config.get(&format!("services {}", get("services")?))?.get("s3.endpoint_url").cloned();
        let role = get("role_arn").map(|arn| Role {
            arn,
            source_profile: get("source_profile"),
            credential_source: get("credential_source"),
            web_identity_token_file: get("web_identity_token_file"),
            session_name: get("role_session_name"),
            external_id: get("external_id"),
            mfa_serial: get("mfa_serial"),
        });
        Self {
            region: get("region"),
            endpoint: of_s3().or_else(|| get("endpoint_url")),
            process: get("credential_process"),
            role,
        }
    }
}

/// The words of a command, without the quotes around those that have spaces. `None` if a quote is not closed. Outside of single
/// quotes a backslash has the next character stand for itself, except on Windows, where paths have backslashes.
pub(crate) fn words(command: &str) -> Option<Vec<String>> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut characters = command.chars();
    while let Some(character) = characters.next() {
        match (character, quote) {
            ('\\', None | Some('"')) if !cfg!(windows) => {
                word.get_or_insert_default().push(characters.next()?)
            }
            ('"' | '\'', None) => {
                word.get_or_insert_default();
                quote = Some(character);
            }
            (end, Some(begin)) if end == begin => quote = None,
            (space, None) if space.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    quote.is_none().then_some(words)
}

/// The value of a setting. A comment follows a space; within the quotes of a command there is none.
fn without_comment<'a>(name: &str, value: &'a str) -> &'a str {
    let mut comments = value.match_indices([' ', '\t']).filter_map(|(at, _)| {
        let begins = value[at + 1..].starts_with(['#', ';']);
        begins.then(|| &value[..at])
    });
    let first = comments.clone().next();
    let unquoted = comments.find(|before| name != "credential_process" || words(before).is_some());
    match (unquoted, words(value)) {
        (Some(before), _) => before,
        // All are within quotes.
        (None, Some(_)) => value,
        (None, None) => first.unwrap_or(value),
    }
}

fn sections(text: &str) -> Sections {
    let mut sections = Sections::new();
    let (mut section, mut outer) = (String::new(), String::new());
    for line in text.trim_start_matches('\u{feff}').lines() {
        let content = line.trim();
        if content.is_empty() || content.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = content.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            section = name.split_whitespace().collect::<Vec<_>>().join(" ");
            outer.clear();
            continue;
        }
        let Some((name, value)) = content.split_once('=') else { continue };
        let name = name.trim().to_ascii_lowercase();
        let value = without_comment(&name, value).trim();
        let is_nested = line.starts_with([' ', '\t']) && !outer.is_empty();
        let name = if is_nested { format!("{outer}.{name}") } else { name };
        if !is_nested {
            outer = if value.is_empty() { name.clone() } else { String::new() };
        }
        sections.entry(section.clone()).or_default().insert(name, value.to_owned());
    }
    sections
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "\u{feff}[default]\nregion = eu-west-1\nendpoint_url = http://default:9000 # ours\n\
                          [ profile  mine ]\nRegion=us-west-2\nservices = local\nendpoint_url = http://all\n\
                          s3 =\n  endpoint_url = http://nested-elsewhere\n\
                          [profile plain]\nendpoint_url=http://plain:9000\n\
                          [services local]\n# a comment\nec2 =\n  endpoint_url = http://ec2\ns3 =\n  \
                          endpoint_url = http://s3:9000\n";

    #[test]
    fn a_profile_has_its_region_and_its_endpoint() {
        let (config, credentials) = (sections(CONFIG), sections("[keys]\nregion = ap-south-1\n"));
        for (profile, region, endpoint) in [
            ("default", Some("eu-west-1"), Some("http://default:9000")),
            ("mine", Some("us-west-2"), Some("http://s3:9000")),
            ("plain", None, Some("http://plain:9000")),
            ("keys", Some("ap-south-1"), None),
            ("none", None, None),
        ] {
            let found = Profile::of(profile, &config, &credentials);
            assert_eq!((found.region.as_deref(), found.endpoint.as_deref()), (region, endpoint), "{profile}");
        }
    }

    #[test]
    fn a_profile_says_who_gives_its_credentials() {
        let config = sections(
            "[profile program]\ncredential_process = \"/opt/my tools/keys\" --for me\n\
             [profile role]\nrole_arn = arn:aws:iam::1:role/reader\nsource_profile = program\nexternal_id=5\n",
        );
        let program = Profile::of("program", &config, &Sections::new());
        assert_eq!(words(&program.process.unwrap()).unwrap(), ["/opt/my tools/keys", "--for", "me"]);
        let role = Profile::of("role", &config, &Sections::new()).role.unwrap();
        assert_eq!(role.source_profile.as_deref(), Some("program"));
        assert_eq!(
            (role.arn.as_str(), role.external_id.as_deref()),
            ("arn:aws:iam::1:role/reader", Some("5"))
        );
    }

    #[test]
    fn a_comment_ends_a_value_and_no_quotes() {
        for (value, expected) in [
            ("/opt/keys # don't", "/opt/keys"),
            ("/opt/keys ; \"the old one", "/opt/keys"),
            ("/opt/keys\t# tabs", "/opt/keys"),
            ("\"/opt/my #tools/keys\" --for me # a 'comment", "\"/opt/my #tools/keys\" --for me"),
            ("'/opt/my ;tools/keys'", "'/opt/my ;tools/keys'"),
            ("/opt/keys#1", "/opt/keys#1"),
            ("'/opt/keys # open", "'/opt/keys"),
        ] {
            let found = sections(&format!("[default]\ncredential_process = {value}\nregion = x # it's\n"));
            assert_eq!(found["default"]["credential_process"], expected, "{value}");
            assert_eq!(found["default"]["region"], "x");
        }
    }

    #[test]
    fn a_command_is_taken_apart_as_shells_do() {
        for (command, expected) in [
            ("", Some(vec![])),
            (" a  b\t", Some(vec!["a", "b"])),
            ("'a \"b' \"c 'd\"e ''", Some(vec!["a \"b", "c 'de", ""])),
            ("a 'b", None),
        ] {
            let expected = expected.map(|words| words.into_iter().map(str::to_owned).collect::<Vec<_>>());
            assert_eq!(words(command), expected, "{command}");
        }
        let escaped = if cfg!(windows) { ["C:\\keys.exe"] } else { ["C:keys.exe"] };
        assert_eq!(words("C:\\keys.exe").unwrap(), escaped);
    }

    #[test]
    fn files_are_found_where_the_environment_says() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config"), CONFIG).unwrap();
        let home = directory.path().to_string_lossy().into_owned();
        let variable = |name: &str| match name {
            "HOME" => Some(home.clone()),
            "AWS_CONFIG_FILE" => Some("~/config".into()),
            _ => None,
        };
        assert_eq!(Profile::find("default", variable).region.as_deref(), Some("eu-west-1"));
        assert_eq!(Profile::find("default", |_| None), Profile::default());
    }
}
