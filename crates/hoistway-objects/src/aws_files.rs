//! What the shared files of AWS's tools say of a profile besides its keys: region and endpoint.
//! <https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html>

use std::{collections::HashMap, path::PathBuf};

/// Settings of one profile.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Profile {
    pub(crate) region: Option<String>,
    pub(crate) endpoint: Option<String>,
}

/// Settings of sections. Those of a nested section are named `outer.inner`.
type Sections = HashMap<String, HashMap<String, String>>;

impl Profile {
    /// The settings of a profile in the files that the environment names.
    pub(crate) fn find(profile: &str, variable: impl Fn(&str) -> Option<String>) -> Self {
        let home = || variable("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        let file = |name: &str, default: &str| {
            let named = variable(name).filter(|path| !path.is_empty());
            let path = match named {
                Some(path) => match path.strip_prefix("~/") {
                    Some(below) => home()?.join(below),
                    None => path.into(),
                },
                None => home()?.join(default),
            };
            Some(sections(&std::fs::read_to_string(path).ok()?))
        };
        let config = file("AWS_CONFIG_FILE", ".aws/config").unwrap_or_default();
        let credentials = file("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials").unwrap_or_default();
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
        Self { region: get("region"), endpoint: of_s3().or_else(|| get("endpoint_url")) }
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
        // A comment follows a space.
        let value =
            value.split(" #").next().unwrap_or_default().split(" ;").next().unwrap_or_default().trim();
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
