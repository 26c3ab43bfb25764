"""`turboquant codebook`: look at the shipped codebooks, check them, and write them anew."""

import hashlib
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from turboquant.cli.arguments import COUNT, Json, parse_count
from turboquant.cli.output import FAILED, print_json, print_table, refusing
from turboquant.progress import progress_bar

if TYPE_CHECKING:
    from turboquant.codebook import Codebook

TOLERANCE = 1e-8  # of a centroid: the files have nine digits

app = typer.Typer(help="Inspect, check and regenerate the codebooks.", no_args_is_help=True)
Folder = Annotated[Path | None, typer.Argument(help="Folder with codebooks; the shipped ones unless given.")]


@app.command()
@refusing
def show(
    dim: Annotated[str | None, typer.Option(metavar=COUNT, help="Head size; all with a file unless given.")] = None,
    bits: Annotated[str | None, typer.Option(metavar=COUNT, help="Bits of a code; all unless given.")] = None,
    as_json: Json = False,
) -> None:
    """Show codebooks: centroids in units of 1/sqrt(dim), distortion, entropy in bits."""
    from turboquant import codebook

    dims = codebook.SHIPPED_DIMS if dim is None else (parse_count("--dim", dim),)
    widths = codebook.SHIPPED_BITS if bits is None else (parse_count("--bits", bits),)
    books = [codebook.load(size, width) for size in dims for width in widths]
    if as_json:
        print_json([asdict(book) for book in books])
        return
    print_table(("dim", "bits", "distortion", "entropy", "centroids above 0"), [row_of(book) for book in books])


def row_of(book: "Codebook") -> tuple[str, ...]:
    above = " ".join(f"{centroid:.4f}" for centroid in book.centroids if centroid > 0)
    return str(book.dim), str(book.bits), f"{book.mse:.6f}", f"{book.entropy:.4f}", above


@app.command()
@refusing
def check(folder: Folder = None, as_json: Json = False) -> None:
    """Check codebook files against ones that are derived anew; exit status 1 if one is wrong."""
    with TemporaryDirectory() as scratch:
        found = [check_file(folder, fresh) for fresh in derive(Path(scratch))]
    if as_json:
        print_json([dict(zip(("file", "sha256", "result"), line, strict=True)) for line in found])
    else:
        for name, digest, result in found:
            typer.echo(f"{'fail' if is_wrong(result) else 'ok':5} {name:10} {digest[:16]:17} {result}")
    if any(is_wrong(result) for _, _, result in found):
        raise typer.Exit(FAILED)


def check_file(folder: Path | None, fresh: Path) -> tuple[str, str, str]:
    """Name, SHA-256 and what is to be said of the file that should equal `fresh`."""
    from turboquant import codebook

    dim = int(fresh.stem[1:])
    stored = codebook.shipped_file(dim) if folder is None else folder / fresh.name
    if stored is None or not stored.is_file():
        return fresh.name, "", "is missing"
    digest = sha256(stored)
    if digest == sha256(fresh):
        return fresh.name, digest, "byte for byte as derived"
    try:
        distance = largest_distance(stored, fresh)
    except (ValueError, KeyError, TypeError) as error:
        return fresh.name, digest, f"is no codebook file: {error!r}"
    return fresh.name, digest, f"{'within' if distance <= TOLERANCE else 'is off by'} {distance:.1e} of what is derived"


def is_wrong(result: str) -> bool:
    return result.startswith("is ")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def largest_distance(stored: Path, fresh: Path) -> float:
    """Between centroids of two files; ValueError if they do not have the same."""
    from turboquant import codebook

    pairs = [(codebook.read(stored, bits), codebook.read(fresh, bits)) for bits in codebook.SHIPPED_BITS]
    return max(abs(a - b) for x, y in pairs for a, b in zip(x.centroids, y.centroids, strict=True))


@app.command()
@refusing
def regenerate(out: Annotated[Path, typer.Argument(help="Folder that is written to.")]) -> None:
    """Derive the codebooks anew and write their files into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    for path in derive(out):
        typer.echo(f"{sha256(path)}  {path}")


def derive(folder: Path) -> list[Path]:
    """The files of all shipped codebooks, derived anew."""
    from turboquant import codebook

    files = []
    with progress_bar(len(codebook.SHIPPED_DIMS)) as progress:
        for dim in codebook.SHIPPED_DIMS:
            progress(f"head size {dim}")
            files.append(codebook.write_file(folder, dim))
    return files
