//! Credentials of Azure: a key, a signature, a client, a workload or a machine.

use super::{Scheme, Signing, chain::Chain};
use crate::{Problem, StoreOptions, renewal::Kept, services::Services};
use reqsign_azure_storage as azure;
use reqsign_core::Context;
use std::sync::Arc;

/// What signs requests, and what to say where there are no credentials.
pub(super) fn scheme(
    context: Context,
    services: &Services,
    options: &StoreOptions,
) -> Result<(Scheme, String), Problem> {
    let mut chain = Chain::new(services);
    chain = match (&options.account_key, &options.sas_token) {
        (Some(key), _) => {
            let Some(account) = &options.account else {
                let reason =
                    "a key needs its account: set AZURE_STORAGE_ACCOUNT_NAME or the store option account";
                return Err(Problem::Invalid(reason.into()));
            };
            chain.push_given(azure::StaticCredentialProvider::new_shared_key(account, key.text()))
        }
        (None, Some(token)) => chain.push_given(azure::StaticCredentialProvider::new_sas_token(token.text())),
        (None, None) => {
            let chain = chain
                .push("a client (AZURE_CLIENT_SECRET)", azure::ClientSecretCredentialProvider::new())
                .push(
                    "a workload identity (AZURE_FEDERATED_TOKEN_FILE)",
                    azure::WorkloadIdentityCredentialProvider::new(),
                );
            match options.endpoint {
                Some(_) => chain,
                None => {
                    chain.push("the managed identity of the machine", azure::ImdsCredentialProvider::new())
                }
            }
        }
    };
    let missing = "no valid credentials for Azure were found: set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or \
                   AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, or the store option anonymous=true for a \
                   public container";
    let provider = Arc::new(Kept::new(chain));
    Ok((Scheme::Azure(Signing::new(context, provider, azure::RequestSigner::new())), missing.into()))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Identity, testing::*},
        *,
    };
    use crate::location::Kind;

    #[test]
    fn azure_is_signed_by_key_by_signature_or_by_token() {
        let key = elsewhere(|own| {
            own.account = Some("mine".into());
            own.account_key = Some("Y2FuYXJ5".to_owned().into());
        });
        let (parts, _) = signed(Kind::Azure, &key, &[], (500, ""));
        assert!(authorization(&parts.unwrap()).starts_with("SharedKey mine:"));
        let sas = elsewhere(|own| own.sas_token = Some("sv=1&sig=a%2Bb".to_owned().into()));
        let (parts, _) = signed(Kind::Azure, &sas, &[], (500, ""));
        assert_eq!(parts.unwrap().uri.query(), Some("sv=1&sig=a%2Bb"));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        std::fs::write(&path, "of-the-pod").unwrap();
        let pod = [
            ("AZURE_TENANT_ID", "tenant"),
            ("AZURE_CLIENT_ID", "client"),
            ("AZURE_FEDERATED_TOKEN_FILE", path.to_str().unwrap()),
        ];
        let token = r#"{"access_token": "of-the-workload", "expires_in": 3600, "token_type": "Bearer"}"#;
        let (parts, asked) = signed(Kind::Azure, &elsewhere(|_| ()), &pod, (200, token));
        assert_eq!((authorization(&parts.unwrap()), asked), ("Bearer of-the-workload", 1));
        let without = elsewhere(|own| own.account_key = Some("Y2FuYXJ5".to_owned().into()));
        assert!(matches!(Identity::new(Kind::Azure, &local(), &without), Err(Problem::Invalid(_))));
    }
}
