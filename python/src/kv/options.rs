//! Options of a store and descriptions of namespaces, as Python hands them over.
#![forbid(unsafe_code)]

use crate::{
    error::IntoPython,
    options::{bytes_of, seconds},
};
use hoistway_kv::{
    DirectPath, Error, FarOptions, NamespaceDescription, NamespaceOptions, Rank, StoreOptions,
};
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyDict};
use std::{path::PathBuf, str::FromStr};

/// The options of a store at `root`: defaults, changed by keyword arguments that are not `None`.
pub(super) fn store_options(
    py: Python<'_>,
    root: PathBuf,
    arguments: Option<&Bound<'_, PyDict>>,
) -> PyResult<StoreOptions> {
    let mut options = StoreOptions::new(root);
    for (name, value) in arguments.into_iter().flatten() {
        if value.is_none() {
            continue;
        }
        let name: String = name.extract()?;
        match name.as_str() {
            "capacity" => options.capacity_bytes = Some(bytes_of("capacity", &value).into_python(py)?),
            "min_free" => options.min_free_bytes = bytes_of("min_free", &value).into_python(py)?,
            "segment_bytes" => {
                options.segment_bytes = Some(bytes_of("segment_bytes", &value).into_python(py)?);
            }
            "max_in_flight" => {
                options.max_in_flight_bytes = bytes_of("max_in_flight", &value).into_python(py)?;
            }
            "scrub_bytes_per_second" => {
                options.scrub_bytes_per_second =
                    bytes_of("scrub_bytes_per_second", &value).into_python(py)?;
            }
            "access" => options.access = one_of(&value)?,
            "layout" => options.layout = Some(one_of(&value)?),
            "durability" => options.durability = one_of(&value)?,
            "eviction" => options.eviction = one_of(&value)?,
            "admission" => options.admission = one_of(&value)?,
            "route" => options.route = one_of(&value)?,
            "direct" => options.direct = direct(&value)?,
            "io_threads" => options.io_threads = Some(value.extract()?),
            "staging" => options.staging_bytes = Some(bytes_of("staging", &value).into_python(py)?),
            "verify" => options.verify = value.extract()?,
            "timeout" => options.timeout = Some(seconds("timeout", value.extract()?).into_python(py)?),
            "partial_timeout" => {
                options.partial_timeout = seconds("partial_timeout", value.extract()?).into_python(py)?;
            }
            "far" => options.far = Some(far_options(value.cast()?)?),
            _ => return Err(PyTypeError::new_err(format!("a store has no option '{name}'"))),
        }
    }
    Ok(options)
}

/// The far tier, as a dictionary that has its root.
fn far_options(arguments: &Bound<'_, PyDict>) -> PyResult<FarOptions> {
    let py = arguments.py();
    let Some(root) = arguments.get_item("root")? else {
        return Err(PyTypeError::new_err("the option 'far' has no 'root'"));
    };
    let mut options = FarOptions::new(root.extract::<PathBuf>()?);
    for (name, value) in arguments {
        let name: String = name.extract()?;
        if value.is_none() || name == "root" {
            continue;
        }
        match name.as_str() {
            "capacity" => options.capacity_bytes = Some(bytes_of("capacity", &value).into_python(py)?),
            "min_free" => options.min_free_bytes = bytes_of("min_free", &value).into_python(py)?,
            "layout" => options.layout = Some(one_of(&value)?),
            "durability" => options.durability = one_of(&value)?,
            "policy" => options.policy = one_of(&value)?,
            "promote" => options.promote = value.extract()?,
            "timeout" => options.timeout = seconds("timeout", value.extract()?).into_python(py)?,
            "lookup_timeout" => {
                options.lookup_timeout = seconds("lookup_timeout", value.extract()?).into_python(py)?;
            }
            "backlog" => options.backlog_bytes = bytes_of("backlog", &value).into_python(py)?,
            "staging" => options.staging_bytes = bytes_of("staging", &value).into_python(py)?,
            _ => return Err(PyTypeError::new_err(format!("the option 'far' has no '{name}'"))),
        }
    }
    Ok(options)
}

/// An option with a fixed set of values, by its name.
pub(super) fn one_of<T: FromStr<Err = Error>>(name: &Bound<'_, PyAny>) -> PyResult<T> {
    name.str()?.to_str()?.parse::<T>().into_python(name.py())
}

/// `True` insists on the direct path, `False` does without.
fn direct(value: &Bound<'_, PyAny>) -> PyResult<DirectPath> {
    match value.extract::<bool>() {
        Ok(true) => Ok(DirectPath::Require),
        Ok(false) => Ok(DirectPath::Off),
        Err(_) => one_of(value),
    }
}

/// The description and the limits of a namespace.
pub(super) fn namespace(
    py: Python<'_>,
    arguments: Option<&Bound<'_, PyDict>>,
) -> PyResult<(NamespaceDescription, NamespaceOptions)> {
    let mut description = NamespaceDescription::default();
    let mut options = NamespaceOptions::default();
    for (name, value) in arguments.into_iter().flatten() {
        if value.is_none() {
            continue;
        }
        let name: String = name.extract()?;
        match name.as_str() {
            "model" => description.model = value.extract()?,
            "dtype" => description.dtype = value.extract()?,
            "layout" => description.layout = value.extract()?,
            "layers" => description.layers = value.extract()?,
            "kv_heads" => description.kv_heads = value.extract()?,
            "head_dim" => description.head_dim = value.extract()?,
            "block_tokens" => description.block_tokens = value.extract()?,
            "tensor_parallel" => description.tensor_parallel = Some(rank(&value)?),
            "pipeline_parallel" => description.pipeline_parallel = Some(rank(&value)?),
            "context_parallel" => description.context_parallel = Some(rank(&value)?),
            "key_algorithm" => description.key_algorithm = value.extract()?,
            "salt" => description.salt = value.extract()?,
            "other" => description.other = value.extract()?,
            "ttl" => options.ttl = Some(seconds("ttl", value.extract()?).into_python(py)?),
            "quota" => options.quota_bytes = Some(bytes_of("quota", &value).into_python(py)?),
            _ => return Err(PyTypeError::new_err(format!("a namespace has no field '{name}'"))),
        }
    }
    Ok((description, options))
}

fn rank(value: &Bound<'_, PyAny>) -> PyResult<Rank> {
    let (rank, size) = value.extract()?;
    Ok(Rank { rank, size })
}
