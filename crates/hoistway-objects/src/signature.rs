//! Parameters of a query that sign a request. They change with each signature, and name no object.

use crate::location::is_azure_host;

/// How a store or a content network signs URLs.
struct Scheme {
    /// Parameters that every such signature has, and what their values look like.
    required: &'static [(&'static str, Value)],
    /// Parameters that some have.
    optional: &'static [&'static str],
    /// Whether it signs URLs of this host.
    signs_for: fn(&str) -> bool,
}

/// What a value has to be.
#[derive(Clone, Copy)]
enum Value {
    Any,
    /// A time in seconds.
    Seconds,
    /// A text that is long enough for a signature.
    Long,
}

/// Shortest signature: that of a hash of 96 bits in base64.
const SIGNATURE_CHARS: usize = 16;

use Value::{Any, Long, Seconds};

const fn any_host(_: &str) -> bool {
    true
}

const SCHEMES: &[Scheme] = &[
    // AWS, version 4.
    Scheme {
        required: &[
            ("x-amz-algorithm", Any),
            ("x-amz-credential", Any),
            ("x-amz-date", Any),
            ("x-amz-expires", Seconds),
            ("x-amz-signedheaders", Any),
            ("x-amz-signature", Long),
        ],
        optional: &["x-amz-security-token"],
        signs_for: any_host,
    },
    // AWS, version 2.
    Scheme {
        required: &[("awsaccesskeyid", Any), ("expires", Seconds), ("signature", Long)],
        optional: &["x-amz-security-token"],
        signs_for: any_host,
    },
    // Google, version 4.
    Scheme {
        required: &[
            ("x-goog-algorithm", Any),
            ("x-goog-credential", Any),
            ("x-goog-date", Any),
            ("x-goog-expires", Seconds),
            ("x-goog-signedheaders", Any),
            ("x-goog-signature", Long),
        ],
        optional: &[],
        signs_for: any_host,
    },
    // Google, version 2.
    Scheme {
        required: &[("googleaccessid", Any), ("expires", Seconds), ("signature", Long)],
        optional: &[],
        signs_for: any_host,
    },
    // Azure's shared access signatures.
    Scheme {
        required: &[("sv", Any), ("sig", Long)],
        optional: &[
            "se", "si", "sip", "ske", "skoid", "sks", "skt", "sktid", "skv", "sp", "spr", "sr", "ss", "srt",
            "st", "saoid", "suoid", "scid", "sdd", "ses",
        ],
        signs_for: is_azure_host,
    },
    // CloudFront, with a policy of its own or of the URL's.
    Scheme {
        required: &[("policy", Long), ("signature", Long), ("key-pair-id", Any)],
        optional: &["hash-algorithm"],
        signs_for: any_host,
    },
    Scheme {
        required: &[("expires", Seconds), ("signature", Long), ("key-pair-id", Any)],
        optional: &["hash-algorithm"],
        signs_for: any_host,
    },
    // Alibaba's OSS, versions 1 and 4.
    Scheme {
        required: &[("ossaccesskeyid", Any), ("expires", Seconds), ("signature", Long)],
        optional: &["security-token"],
        signs_for: any_host,
    },
    Scheme {
        required: &[
            ("x-oss-signature-version", Any),
            ("x-oss-credential", Any),
            ("x-oss-date", Any),
            ("x-oss-expires", Seconds),
            ("x-oss-signature", Long),
        ],
        optional: &["x-oss-additional-headers", "x-oss-security-token"],
        signs_for: any_host,
    },
    // Tencent's COS.
    Scheme {
        required: &[
            ("q-sign-algorithm", Any),
            ("q-ak", Any),
            ("q-sign-time", Any),
            ("q-key-time", Any),
            ("q-header-list", Any),
            ("q-url-param-list", Any),
            ("q-signature", Long),
        ],
        optional: &["x-cos-security-token"],
        signs_for: any_host,
    },
    // Huawei's OBS.
    Scheme {
        required: &[("accesskeyid", Any), ("expires", Seconds), ("signature", Long)],
        optional: &["x-obs-security-token"],
        signs_for: any_host,
    },
];

/// Path and query of a request without what signs it. The query stays as it is where it has no complete signature of a
/// scheme, or a parameter of it twice: what a server makes of that is not known.
pub(crate) fn unsigned(host: &str, target: &str) -> String {
    let Some((path, query)) = target.split_once('?') else { return target.to_owned() };
    let pairs: Vec<(String, &str)> = query
        .split('&')
        .map(|pair| (pair.split('=').next().unwrap_or_default().to_ascii_lowercase(), pair))
        .collect();
    let value = |wanted: &str| {
        let mut found = pairs.iter().filter(|(name, _)| name == wanted).map(|(_, pair)| *pair);
        let first = found.next()?;
        found.next().is_none().then(|| first.split_once('=').map_or("", |(_, value)| value))
    };
    let is_complete = |scheme: &&Scheme| {
        let mut required = scheme.required.iter();
        (scheme.signs_for)(host) && required.all(|(name, form)| value(name).is_some_and(|own| form.fits(own)))
    };
    let Some(scheme) = SCHEMES.iter().find(is_complete) else { return target.to_owned() };
    let signs =
        |name: &str| scheme.required.iter().any(|(own, _)| *own == name) || scheme.optional.contains(&name);
    let rest: Vec<&str> = pairs.iter().filter(|(name, _)| !signs(name)).map(|(_, pair)| *pair).collect();
    format!("{path}?{}", rest.join("&"))
}

impl Value {
    fn fits(self, value: &str) -> bool {
        match self {
            Any => !value.is_empty(),
            Seconds => !value.is_empty() && value.bytes().all(|own| own.is_ascii_digit()),
            Long => value.len() >= SIGNATURE_CHARS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As long as a signature.
    const S: &str = "0123456789abcdefghi";

    #[test]
    fn a_complete_signature_is_no_part_of_what_is_named() {
        let v4 = |prefix: &str| {
            format!(
                "{prefix}Algorithm=a&{prefix}Credential=k%2F5&{prefix}Date=20260101T000000Z&{prefix}Expires=60&\
                 {prefix}SignedHeaders=host&{prefix}Signature={S}"
            )
        };
        let cases = [
            ("host", v4("X-Amz-")),
            ("host", format!("{}&X-Amz-Security-Token=t", v4("X-Amz-"))),
            ("host", v4("x-goog-")),
            ("host", format!("AWSAccessKeyId=k&Expires=1&Signature={S}")),
            ("host", format!("GoogleAccessId=k&Expires=1&Signature={S}")),
            ("host", format!("Policy={S}&Signature={S}&Key-Pair-Id=k")),
            ("host", format!("Expires=1&Signature={S}&Key-Pair-Id=k")),
            ("host", format!("OSSAccessKeyId=k&Expires=1&Signature={S}")),
            (
                "host",
                format!(
                    "q-sign-algorithm=sha1&q-ak=k&q-sign-time=1;2&q-key-time=1;2&q-header-list=host&\
                     q-url-param-list=a&q-signature={S}"
                ),
            ),
            ("a.blob.core.windows.net", format!("sv=2021-08-06&se=2026&sr=b&sp=r&st=2026&sig={S}")),
        ];
        for (host, signature) in cases {
            assert_eq!(unsigned(host, &format!("/a?{signature}")), "/a?", "{signature}");
            let with_version = format!("/a?{signature}&versionId=5");
            assert_eq!(unsigned(host, &with_version), "/a?versionId=5", "{signature}");
        }
    }

    #[test]
    fn what_is_no_complete_signature_names_an_object() {
        for (host, target) in [
            ("host", "/get?st=1".to_owned()),
            ("host", "/get?sv=1&sig=0123456789abcdefghi&se=2".into()),
            ("a.blob.core.windows.net", "/get?sv=1&st=2".into()),
            ("host", "/get?policy=latest".into()),
            ("host", "/get?expires=1".into()),
            ("host", format!("/get?Expires=never&Signature={S}&AWSAccessKeyId=k")),
            ("host", format!("/get?Expires=1&Signature={S}")),
            ("host", format!("/get?X-Amz-Signature={S}&X-Amz-Date=5")),
            ("host", format!("/get?token={S}")),
            // The token may be what names the file.
            ("host", format!("/get?e=1767225600&token=k:{S}")),
            ("host", format!("/get?token={S}&expires=1767225600")),
            ("host", format!("/get?AWSAccessKeyId=k&Expires=1&Signature={S}&Signature={S}")),
            ("host", "/get".into()),
            ("host", "/get?".into()),
        ] {
            assert_eq!(unsigned(host, &target), target);
        }
    }
}
