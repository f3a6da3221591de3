//! Rows of tables larger than memory.
#![allow(unsafe_code)]

use crate::{
    handle::{self, held},
    hoistway_catalog,
    read::hoistway_reader,
    status::{Failure, call, hoistway_status},
    text,
};
use ::hoistway_experts::rows::Rows;
use std::{
    ffi::{c_char, c_void},
    ptr,
};

/// A table in a file, such as an embedding. Its rows have equal length.
pub struct hoistway_rows {
    rows: Rows,
}

/// Opens a tensor as a table. A row is the slice at one index of the slowest dimension. Rows are small: use a reader
/// with many reads in flight, such as 64. The catalog may be freed afterwards. The reader may be freed too: it ends
/// once its tables are freed. `HOISTWAY_NOT_FOUND` if there is no such tensor. Free `rows` with `hoistway_rows_free`.
///
/// # Safety
/// `reader` and `catalog` must be live, `tensor` a string, `rows` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_rows_open(
    reader: *const hoistway_reader,
    catalog: *const hoistway_catalog,
    tensor: *const c_char,
    rows: *mut *mut hoistway_rows,
) -> hoistway_status {
    let open = || {
        // SAFETY: live and a string, as the caller says.
        let (reader, catalog, tensor) = unsafe {
            (
                held(reader, "reader")?,
                held(catalog, "catalog")?,
                text::required(tensor, "name of the tensor")?,
            )
        };
        Ok(hoistway_rows { rows: Rows::of_tensor(reader.shared(), catalog.checkpoint(), tensor)? })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(rows, open) }
}

/// Frees a table. NULL is allowed.
///
/// # Safety
/// `rows` must be NULL or come from [`hoistway_rows_open`], and neither be in use nor have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_rows_free(rows: *mut hoistway_rows) {
    // SAFETY: as the caller says.
    unsafe { handle::free(rows) }
}

/// Returns the number of rows; 0 if `rows` is NULL.
///
/// # Safety
/// `rows` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_rows_count(rows: *const hoistway_rows) -> u64 {
    // SAFETY: live, as the caller says.
    unsafe { rows.as_ref() }.map_or(0, |table| table.rows.len())
}

/// Returns the length of a row in bytes; 0 if `rows` is NULL.
///
/// # Safety
/// `rows` must be NULL or live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_rows_row_bytes(rows: *const hoistway_rows) -> u64 {
    // SAFETY: live, as the caller says.
    unsafe { rows.as_ref() }.map_or(0, |table| table.rows.row_bytes())
}

/// Reads `count` rows into host memory, one after the other, in the order of `numbers`. A row that is named several
/// times is read once, and neighbouring rows are read together. `bytes` is the size of the destination, and must be
/// `count` times the length of a row. On failure the destination is unchanged: `HOISTWAY_INVALID_ARGUMENT` if `bytes`
/// is wrong, `HOISTWAY_NOT_FOUND` if there is no such row.
///
/// # Safety
/// `rows` must be live, `numbers` be `count` numbers, `destination` writable for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_rows_gather(
    rows: *const hoistway_rows,
    numbers: *const u64,
    count: u64,
    destination: *mut c_void,
    bytes: u64,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, and as many, as the caller says.
        let (table, numbers) = unsafe { (held(rows, "table")?, handle::list(numbers, count, "rows")?) };
        let needed = count.checked_mul(table.rows.row_bytes());
        if needed != Some(bytes) {
            let row = table.rows.row_bytes();
            let reason = format!("the destination has {bytes} bytes, but {count} rows take {row} bytes each");
            return Err(Failure::argument(reason));
        }
        if bytes > 0 {
            handle::check_place(destination, "rows")?;
        }
        let gathered = table.rows.gather(numbers)?;
        if bytes == 0 {
            return Ok(());
        }
        let row_bytes = table.rows.row_bytes() as usize;
        for (place, row) in gathered.iter().enumerate() {
            // SAFETY: there is room for all rows, as the caller says; a row has `row_bytes` bytes.
            unsafe {
                let target = destination.cast::<u8>().add(place * row_bytes);
                ptr::copy_nonoverlapping(row.as_ptr(), target, row_bytes);
            }
        }
        Ok(())
    })
}
