//! Completion ports: many transfers in flight from one thread, each of which is told when it has ended.
#![allow(unsafe_code)]

use super::{code, files, transfer};
use std::{
    cell::UnsafeCell,
    collections::VecDeque,
    fmt,
    fs::File,
    io,
    os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle, RawHandle},
    ptr,
    sync::Arc,
};
use windows_sys::Win32::{
    Foundation::{CompareObjectHandles, ERROR_IO_PENDING, INVALID_HANDLE_VALUE},
    Storage::FileSystem::ReadFile,
    System::{
        IO::{
            CancelIoEx, CreateIoCompletionPort, GetOverlappedResult, GetQueuedCompletionStatusEx, OVERLAPPED,
            OVERLAPPED_ENTRY,
        },
        Threading::INFINITE,
    },
};

/// Files that a port keeps open, at most, beside those that it reads.
const KEPT_FILES: usize = 64;
/// Ends that are taken at once.
const ENDS: usize = 64;

/// A completion port, and the handles whose transfers it tells the end of.
///
/// A handle belongs to one port for ever. So the port opens each file again, for itself.
pub struct Port {
    port: OwnedHandle,
    /// The one used last is the last one.
    files: VecDeque<Arc<PortFile>>,
}

/// A file as a port reads it.
#[derive(Debug)]
struct PortFile {
    /// The file's handle, as the caller has it, when it was opened again.
    value: RawHandle,
    /// Another handle of the same open file. It shows whether a handle of the same value still is that file.
    original: File,
    /// The handle of the port.
    file: File,
}

// SAFETY: `value` is compared, and never used as a handle.
unsafe impl Send for PortFile {}
// SAFETY: as above.
unsafe impl Sync for PortFile {}

/// The system's state of a transfer in flight. It must not move until the transfer ends.
#[derive(Default)]
pub struct TransferState(UnsafeCell<OVERLAPPED>);

impl TransferState {
    /// Returns its address, which tells transfers from each other.
    pub fn address(&self) -> usize {
        self.0.get().addr()
    }
}

/// A transfer in flight: the handle that it uses.
#[derive(Debug)]
pub struct Transfer(Arc<PortFile>);

/// The outcome of starting a transfer.
#[derive(Debug)]
pub enum Started {
    /// The port will tell its end.
    InFlight(Transfer),
    /// It has ended at once, with so many bytes or an error, and the port tells nothing of it.
    Ended(io::Result<usize>),
}

impl Port {
    /// Makes a port without files.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        // SAFETY: makes a new port, without a handle of a file.
        let port = unsafe { CreateIoCompletionPort(INVALID_HANDLE_VALUE, ptr::null_mut(), 0, 1) };
        if port.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new handle, which has no other owner.
        Ok(Self { port: unsafe { OwnedHandle::from_raw_handle(port) }, files: VecDeque::new() })
    }

    /// Starts a read of up to as many bytes as fit, from `offset` on. Its end is told to [`wait`](Self::wait).
    ///
    /// # Errors
    /// The system's, if the file cannot be opened for this port.
    ///
    /// # Safety
    /// Until its end was told, `bytes` stays valid and nothing else uses it, `place` stays where it is and no other transfer
    /// uses it, and the returned transfer is not dropped.
    pub unsafe fn read(
        &mut self,
        file: &File,
        bytes: &mut [u8],
        offset: u64,
        place: &TransferState,
    ) -> io::Result<Started> {
        let opened = self.handle_of(file)?;
        let len = transfer::most(&opened.file, bytes.as_ptr(), bytes.len(), offset);
        // SAFETY: by the contract of this function, nothing uses it.
        unsafe { place.0.get().write(transfer::at(offset)) };
        let handle = opened.file.as_raw_handle();
        // SAFETY: by the contract of this function; the handle is that of the returned value.
        if unsafe { ReadFile(handle, bytes.as_mut_ptr(), len, ptr::null_mut(), place.0.get()) } == 0 {
            let error = io::Error::last_os_error();
            if code(&error) != Some(ERROR_IO_PENDING) {
                return Ok(Started::Ended(transfer::at_end(transfer::retried(error))));
            }
        }
        // Also one that has ended by now is told to the port.
        Ok(Started::InFlight(Transfer(opened)))
    }

    /// Waits until a transfer has ended, and appends the addresses of the places of those that have.
    ///
    /// # Errors
    /// The system's: no end is told any more.
    pub fn wait(&self, ended: &mut Vec<usize>) -> io::Result<()> {
        let mut entries = [OVERLAPPED_ENTRY::default(); ENDS];
        let mut count = 0;
        let port = self.port.as_raw_handle();
        // SAFETY: the handle is open, and the call writes no more entries than there is room for.
        let is_told = unsafe {
            GetQueuedCompletionStatusEx(port, entries.as_mut_ptr(), ENDS as u32, &raw mut count, INFINITE, 0)
        };
        if is_told == 0 {
            return Err(io::Error::last_os_error());
        }
        ended.extend(entries.iter().take(count as usize).map(|entry| entry.lpOverlapped.addr()));
        Ok(())
    }

    /// The handle of the port for a file.
    fn handle_of(&mut self, file: &File) -> io::Result<Arc<PortFile>> {
        let value = file.as_raw_handle();
        let is_same = |opened: &Arc<PortFile>| {
            // The value alone may be that of another file by now.
            // SAFETY: both handles are open during the call.
            opened.value == value
                && unsafe { CompareObjectHandles(opened.original.as_raw_handle(), value) } != 0
        };
        if let Some(at) = self.files.iter().rposition(is_same)
            && let Some(opened) = self.files.remove(at)
        {
            self.files.push_back(opened.clone());
            return Ok(opened);
        }
        let again = files::reopen_alike(file)?;
        // SAFETY: both handles are open; a handle that was opened just now belongs to no other port.
        let port = unsafe { CreateIoCompletionPort(again.as_raw_handle(), self.port.as_raw_handle(), 0, 0) };
        if port.is_null() {
            return Err(io::Error::last_os_error());
        }
        let opened = Arc::new(PortFile { value, original: file.try_clone()?, file: again });
        if self.files.len() >= KEPT_FILES {
            self.files.pop_front();
        }
        self.files.push_back(opened.clone());
        Ok(opened)
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port").field("files", &self.files.len()).finish_non_exhaustive()
    }
}

impl Transfer {
    /// Returns how many bytes a read that has ended brought: 0 at the end of the file.
    ///
    /// # Errors
    /// The system's.
    pub fn result(&self, place: &TransferState) -> io::Result<usize> {
        let mut count = 0;
        let handle = self.0.file.as_raw_handle();
        // SAFETY: the handle is open, and the structure is that of a transfer that has ended.
        if unsafe { GetOverlappedResult(handle, place.0.get(), &raw mut count, 0) } != 0 {
            return Ok(count as usize);
        }
        transfer::at_end(transfer::retried(io::Error::last_os_error()))
    }

    /// Asks the system to end it, which may still take time.
    pub fn cancel(&self, place: &TransferState) {
        // SAFETY: the handle is open, and the structure is only compared.
        unsafe { CancelIoEx(self.0.file.as_raw_handle(), place.0.get()) };
    }
}
