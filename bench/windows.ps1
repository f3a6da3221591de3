<#
.SYNOPSIS
Examines a Windows machine with hoistway and writes one JSON file to send.

.DESCRIPTION
Runs `doctor`, loads checkpoints by each route, direct and through the cache, and measures reads by chunk size. Needs nothing but
hoistway.exe. Nothing is sent and nothing is changed; the file names the paths that were given.

.EXAMPLE
powershell -ExecutionPolicy Bypass -File windows.ps1 -Model 'D:\models\small;D:\models\large' -Hoistway .\hoistway.exe
#>
param(
    # Checkpoints, such as a small and a large one: files or folders, with semicolons between.
    [Parameter(Mandatory = $true)] [string] $Model,
    [string] $Hoistway = 'hoistway.exe',
    [string] $Output = 'hoistway-windows.json',
    # Load and read to this device too, such as cuda:0.
    [string] $Device = '',
    [int] $Repeats = 3
)
$ErrorActionPreference = 'Stop'
[Console]::OutputEncoding = [Text.Encoding]::UTF8

# Runs the command. What it says is kept, also if it fails.
function Invoke-Hoistway([string[]] $Arguments) {
    Write-Host "hoistway $($Arguments -join ' ')"
    # Windows PowerShell makes errors of what a program writes to standard error.
    $ErrorActionPreference = 'Continue'
    $lines = & $Hoistway @Arguments 2>&1
    $code = $LASTEXITCODE
    $said = ($lines | Where-Object { $_ -isnot [Management.Automation.ErrorRecord] }) -join "`n"
    $errors = ($lines | Where-Object { $_ -is [Management.Automation.ErrorRecord] }) -join "`n"
    $result = $null
    if ($said) {
        try { $result = $said | ConvertFrom-Json } catch { $errors = "$said`n$errors" }
    }
    return [ordered]@{ arguments = $Arguments; exit_code = $code; result = $result; errors = $errors }
}

$models = @($Model -split ';' | Where-Object { $_ })
$loads = @(
    @('--route', 'auto'),
    @('--route', 'overlapped', '--direct', 'always'),
    @('--route', 'overlapped', '--direct', 'never'),
    @('--route', 'threads', '--direct', 'always'),
    @('--route', 'threads', '--direct', 'never'),
    @('--route', 'mapped', '--populate'),
    # An error where its libraries are not beside the program.
    @('--route', 'directstorage')
)
# Reads to the host, which need no arguments, and to the device.
$targets = @(, @())
if ($Device) {
    $targets += , @('--device', $Device)
    $loads += , @('--device', $Device, '--route', 'staged', '--direct', 'always')
    $loads += , @('--device', $Device, '--route', 'staged', '--direct', 'never')
    $loads += , @('--device', $Device, '--route', 'directstorage')
}
$system = Get-CimInstance Win32_OperatingSystem
$report = [ordered]@{
    version   = (& $Hoistway --version) -join ''
    system    = "$($system.Caption) $($system.Version)"
    memory    = $system.TotalVisibleMemorySize
    processor = (Get-CimInstance Win32_Processor | Select-Object -First 1).Name
    drives    = @(Get-CimInstance Win32_DiskDrive | ForEach-Object { "$($_.Model) $($_.Size)" })
    doctor    = Invoke-Hoistway (@('doctor', '--json') + $models)
    loads     = @()
    reads     = @()
}
foreach ($one in $models) {
    foreach ($way in $loads) {
        for ($number = 0; $number -lt $Repeats; $number++) {
            $report.loads += Invoke-Hoistway (@('load', '--json', $one) + $way)
        }
    }
}
$files = @(foreach ($one in $models) {
        if (Test-Path -PathType Container $one) {
            Get-ChildItem $one -File | Where-Object { $_.Extension -in '.safetensors', '.gguf' } | ForEach-Object FullName
        } else {
            $one
        }
    })
foreach ($target in $targets) {
    foreach ($route in 'overlapped', 'threads', 'directstorage') {
        $report.reads += Invoke-Hoistway (@('bench', 'read', '--json', '--route', $route, '--direct', 'always',
                '--buffer-sizes', '256MiB', '--chunk-sizes', '64KiB,256KiB,1MiB,4MiB,16MiB,64MiB') + $target + $files)
    }
}
# Without a byte order mark, which few programs expect.
[IO.File]::WriteAllText((Join-Path (Get-Location) $Output), ($report | ConvertTo-Json -Depth 32), (New-Object Text.UTF8Encoding $false))
Write-Host "written: $Output"
