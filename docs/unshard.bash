# SPDX-License-Identifier: MIT
# Completion of unshard for bash. The command itself knows its words: `unshard --complete`.
_unshard() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    local verb=${COMP_WORDS[1]-} list='' words=''
    COMPREPLY=()
    if [[ $word == '=' ]]; then # bash cuts --color=a into three words
        word=
    elif [[ $before == '=' ]]; then
        before=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    if ((COMP_CWORD == 1)); then
        words=$("$1" --complete 2>/dev/null)
    else
        [[ $before == -o ]] && list=${word%"${word##*,}"}
        [[ $before == -* ]] && words=$("$1" --complete "$verb" "$before" 2>/dev/null)
        [[ -z $words && $word == -* ]] && words=$("$1" --complete "$verb" 2>/dev/null)
    fi
    if [[ -n $words ]]; then
        mapfile -t COMPREPLY < <(compgen -P "$list" -W "$words" -- "${word#"$list"}")
        compopt +o filenames
        [[ ${COMPREPLY[0]-} == *= ]] || compopt +o nospace
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
    fi
}
complete -o filenames -o nospace -F _unshard unshard
