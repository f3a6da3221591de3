//! Copies.

use super::stream;
use crate::{
    control::counters,
    execution::{
        context::Context,
        copy::{Copy, Endpoint, Side, stage},
        operation::Operation,
    },
    gate,
    memory::{device, host},
    status::{Code, INVALID_VALUE},
    system::now_ns,
};
use std::ffi::{c_uint, c_void};

/// Rows can't be further apart.
pub(crate) const PITCH_MAX: usize = 0x7FFF_FFFF;

/// `CUDA_MEMCPY2D_v2`, and `hip_Memcpy2D`.
#[repr(C)]
pub(crate) struct Memcpy2D {
    source: Memcpy2DSide,
    destination: Memcpy2DSide,
    width: usize,
    height: usize,
}

#[repr(C)]
struct Memcpy2DSide {
    x: usize,
    y: usize,
    memory_type: c_uint,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

const _: () = assert!(size_of::<Memcpy2D>() == 128);

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    destination: u64,
    source: *const c_void,
    bytes: usize,
    stream: usize,
) -> Code {
    gate::in_context("cuMemcpyHtoDAsync_v2", |context| {
        // SAFETY: the source is the caller's, with as many bytes as it says.
        unsafe { enqueue(context, stream, at_host(source as usize), at_device(destination), bytes, 1) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    destination: *mut c_void,
    source: u64,
    bytes: usize,
    stream: usize,
) -> Code {
    gate::in_context("cuMemcpyDtoHAsync_v2", |context| {
        // SAFETY: the destination is the caller's, with as many bytes as it says.
        unsafe { enqueue(context, stream, at_device(source), at_host(destination as usize), bytes, 1) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    destination: u64,
    source: u64,
    bytes: usize,
    stream: usize,
) -> Code {
    gate::in_context("cuMemcpyDtoDAsync_v2", |context| {
        // SAFETY: neither side is the host's.
        unsafe { enqueue(context, stream, at_device(source), at_device(destination), bytes, 1) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoD_v2(destination: u64, source: *const c_void, bytes: usize) -> Code {
    gate::in_context("cuMemcpyHtoD_v2", |context| {
        let source = Side { place: Endpoint::Waiting(source as usize), pitch: 0 };
        run(context, source, Side { place: Endpoint::AnyDevice(destination), pitch: 0 }, bytes)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(destination: *mut c_void, source: u64, bytes: usize) -> Code {
    gate::in_context("cuMemcpyDtoH_v2", |context| {
        let destination = Side { place: Endpoint::Waiting(destination as usize), pitch: 0 };
        run(context, Side { place: Endpoint::AnyDevice(source), pitch: 0 }, destination, bytes)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy2DAsync_v2(parameters: *const Memcpy2D, stream: usize) -> Code {
    gate::in_context("cuMemcpy2DAsync_v2", |context| {
        // SAFETY: passed on.
        unsafe { enqueue_rows(context, parameters, stream) }
    })
}

/// Gives a copy of rows to a stream.
///
/// # Safety
/// As for [`enqueue`]; `parameters` is null or can be read.
pub(crate) unsafe fn enqueue_rows(
    context: &Context,
    parameters: *const Memcpy2D,
    stream: usize,
) -> Result<(), Code> {
    // SAFETY: null or the caller's structure.
    let parameters = unsafe { parameters.as_ref() }.ok_or(INVALID_VALUE)?;
    let Memcpy2D { source, destination, width, height } = parameters;
    let (source, destination) = (source.side(*width)?, destination.side(*width)?);
    // SAFETY: the host's side, if any, is the caller's, with as many bytes as the structure says.
    unsafe { enqueue(context, stream, source, destination, *width, *height) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: usize) -> Code {
    gate::in_context("cuMemsetD8Async", |context| {
        let stream = stream::get(context, stream)?;
        stream.push(Operation::Fill { address, value, bytes: bytes as u64 });
        Ok(())
    })
}

impl Memcpy2DSide {
    fn side(&self, width: usize) -> Result<Side, Code> {
        const HOST: c_uint = 1;
        const DEVICE: c_uint = 2;
        const UNIFIED: c_uint = 4;
        let fits = self.x.checked_add(width).is_some_and(|end| end <= self.pitch);
        if !fits || self.pitch > PITCH_MAX {
            return Err(INVALID_VALUE);
        }
        let start = match self.memory_type {
            HOST => self.host as u64,
            DEVICE | UNIFIED => self.device,
            _ => return Err(INVALID_VALUE),
        };
        let skipped = self.y.checked_mul(self.pitch).and_then(|rows| rows.checked_add(self.x));
        let first = skipped.and_then(|skipped| start.checked_add(skipped as u64)).ok_or(INVALID_VALUE)?;
        let on_device = match self.memory_type {
            UNIFIED => device::of_address(first).is_some(),
            memory_type => memory_type == DEVICE,
        };
        let side = if on_device { at_device(first) } else { at_host(first as usize) };
        Ok(Side { pitch: self.pitch, ..side })
    }
}

pub(crate) fn at_device(address: u64) -> Side {
    Side { place: Endpoint::Device(address), pitch: 0 }
}

/// Taken to be pinned until the whole range is known.
pub(crate) fn at_host(address: usize) -> Side {
    Side { place: Endpoint::Pinned(address), pitch: 0 }
}

/// How many bytes a side spans, if such a side can exist.
fn span(side: &Side, width: usize, rows: usize) -> Result<usize, Code> {
    side.pitch.checked_mul(rows - 1).and_then(|gaps| gaps.checked_add(width)).ok_or(INVALID_VALUE)
}

/// Gives a copy to a stream. What isn't pinned is read before this returns, or written.
///
/// # Safety
/// A side that is the host's has as many rows and bytes as are asked for.
pub(crate) unsafe fn enqueue(
    context: &Context,
    stream: usize,
    source: Side,
    destination: Side,
    width: usize,
    rows: usize,
) -> Result<(), Code> {
    let stream = stream::get(context, stream)?;
    if width == 0 || rows == 0 {
        return Ok(());
    }
    // SAFETY: the caller promised that the source can be read.
    let source = unsafe { staged(context, source, width, rows) }?;
    let (destination, waits) = awaited(context, destination, width, rows)?;
    stream.push(Operation::Copy(Copy { source, destination, width, rows, queued_ns: now_ns() }));
    if waits {
        stream.synchronize();
        context.owner.health()?;
    }
    Ok(())
}

/// Runs a copy of which the caller awaits the end.
fn run(context: &Context, source: Side, destination: Side, bytes: usize) -> Result<(), Code> {
    for side in [&source, &destination] {
        check(side)?;
    }
    let stream = context.default_stream()?;
    stream.push(Operation::Copy(Copy { source, destination, width: bytes, rows: 1, queued_ns: now_ns() }));
    stream.synchronize();
    context.owner.health()
}

/// Reads a source that isn't pinned.
///
/// # Safety
/// A source that is the host's has as many rows and bytes as are asked for.
unsafe fn staged(context: &Context, source: Side, width: usize, rows: usize) -> Result<Side, Code> {
    check(&source)?;
    let span = span(&source, width, rows)?;
    match source.place {
        Endpoint::Pinned(address) if !host::pinned().covers(context.owner.driver(), address, span) => {
            counters::PAGEABLE_COPIES.add(1);
            // SAFETY: the caller promised so.
            let bytes = unsafe { stage(address, source.pitch, width, rows) };
            Ok(Side { place: Endpoint::Staged(bytes), pitch: width })
        }
        _ => Ok(source),
    }
}

/// Says whether the caller has to wait until a destination is written, because it isn't pinned.
fn awaited(context: &Context, destination: Side, width: usize, rows: usize) -> Result<(Side, bool), Code> {
    check(&destination)?;
    let span = span(&destination, width, rows)?;
    match destination.place {
        Endpoint::Pinned(address) if !host::pinned().covers(context.owner.driver(), address, span) => {
            counters::PAGEABLE_COPIES.add(1);
            Ok((Side { place: Endpoint::Waiting(address), ..destination }, true))
        }
        _ => Ok((destination, false)),
    }
}

/// The host can't follow a device's addresses, nor null.
fn check(side: &Side) -> Result<(), Code> {
    match side.place {
        Endpoint::Pinned(address) | Endpoint::Waiting(address)
            if address == 0 || device::of_address(address as u64).is_some() =>
        {
            Err(INVALID_VALUE)
        }
        _ => Ok(()),
    }
}
